"""A thread that writes one rank's file of a checkpoint and hashes it.

A thread and not, as in megatron-core, a forked process: the threads of CUDA, NCCL and wandb do not come along in a fork, and the locks they
hold then stay locked. Writing, syncing and hashing leave Python's lock to training.
"""

import inspect
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from hybrid_megatron.checkpoint.integrity import hash_file
from hybrid_megatron.checkpoint.shards import Share
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

# Without its decorator, which would keep Python from collecting garbage in the whole process for as long as it writes.
_write_file = inspect.unwrap(FileSystemWriterAsync.write_preloaded_data)

_LAST_ITEM_SECONDS = 10.0


class Writing:
    """A share on its way to the disk; `going` until all is written, or `error` says why not."""

    def __init__(self, share: Share, tensors: list[tuple[WriteItem, torch.Tensor]]):
        """`tensors`: of the share, as they are to be written."""
        self.path = str(Path(share.checkpoint_dir) / share.name)
        self.error: str | None = None
        self.results: list[WriteResult] = []
        self.hashes: dict[str, str] = {}
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(share, tensors), name="checkpoint writer", daemon=True)
        self._thread.start()

    @property
    def going(self) -> bool:
        return self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)

    def give_up(self) -> None:
        """Stop at the next tensor, and wait for that so long and no longer."""
        self._given_up.set()
        self.wait(_LAST_ITEM_SECONDS)

    def _work(self, share: Share, tensors: list[tuple[WriteItem, torch.Tensor]]) -> None:
        if not share.objects and not tensors:
            return
        bucket = (self.path, share.name, (share.objects, self._each(tensors)))
        try:
            _, written = _write_file([share.transforms], 0, bucket, None, None, True)
            if isinstance(written, Exception):
                raise written
            self.results, self.hashes = written, {share.name: hash_file(Path(self.path))}
        except Exception as error:  # torch's zip writer raises RuntimeError over the system's OSError
            self.error = _reason(error)
            _forget_frames(error)

    def _each(self, tensors: list[tuple[WriteItem, torch.Tensor]]) -> Iterator[tuple[WriteItem, torch.Tensor]]:
        for item, tensor in tensors:
            if self._given_up.is_set():
                raise RuntimeError("given up")
            tensor = tensor.cpu()
            # torch.save writes all of a storage, also where the tensor is a part of it
            yield item, tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _forget_frames(error: BaseException | None) -> None:
    """Break the cycle of exception and frames that the writer leaves: collecting the buffers in it crashes CPython 3.12."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _reason(error: BaseException) -> str:
    """What the operating system says, where it says something."""
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, OSError) and below.strerror:
            return below.strerror
        below = below.__cause__ or below.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
