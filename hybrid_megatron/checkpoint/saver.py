"""Save a run's checkpoints, one at a time, while training goes on.

Training waits while the save is planned and this rank's shards are copied to the host (and, for a permanent one, the optimizer state is
gathered); a thread of each rank writes and hashes its file; and when all ranks know that all threads are done, training waits once more
while rank 0 writes down what all have written, marker last, and gives the folder its name.
"""

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import disk_usage

import torch

from hybrid_megatron.checkpoint.content import held_params, run_content
from hybrid_megatron.checkpoint.form import OPTIMIZER_SHARDING, PERMANENT, ROLLING
from hybrid_megatron.checkpoint.host_memory import HostMemory, short_of_memory
from hybrid_megatron.checkpoint.integrity import hash_file, hash_text, write_hashes
from hybrid_megatron.checkpoint.shards import Planner, Share
from hybrid_megatron.checkpoint.sizes import gather_bytes, size
from hybrid_megatron.checkpoint.store import MARKER, CheckpointStore, Progress, is_of_a_step
from hybrid_megatron.checkpoint.writer import Writing
from hybrid_megatron.config.schema import CheckpointConfig
from hybrid_megatron.errors import CheckpointError
from hybrid_megatron.parallel import ParallelState
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint.planner import WriteItem

_POLL_SECONDS = 0.1


@dataclass
class _Save:
    """A save under way."""

    partial: Path
    marker: str
    facts: dict
    """What its event says."""
    share: Share
    writing: Writing
    began: float
    stall: float = 0.0
    """Seconds that training has waited for it."""


class Saver:
    """Every method is called by all ranks together, unless it says otherwise."""

    def __init__(
        self,
        store: CheckpointStore,
        settings: CheckpointConfig,
        model: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        state: ParallelState,
        tell: Callable[..., None],
    ):
        """`tell(kind, **facts)`: records an event, on rank 0."""
        self.store, self.settings, self.state = store, settings, state
        self._model, self._optimizer, self._tell = model, optimizer, tell
        self._planners = {form: Planner(state) for form in OPTIMIZER_SHARDING}
        self._memory = HostMemory()
        self._save: _Save | None = None
        self._removal: threading.Thread | None = None
        self._stall = 0.0
        self._said: set[str] = set()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *error) -> None:
        """Not collective. What is still being written is given up: whoever can wait for it does so before."""
        if self._save is not None:
            self._save.writing.give_up()
            self._discard(self._save.partial)
        if self._removal is not None:
            self._removal.join()
        if self._save is None or not self._save.writing.going:
            self._memory.release()

    @property
    def under_way(self) -> bool:
        """Not collective, and the same on all ranks."""
        return self._save is not None

    @property
    def writing(self) -> int:
        """1 while this rank writes. Not collective."""
        return int(self._save is not None and self._save.writing.going)

    def save(self, name: str, progress: Progress, needed_bytes: int, *, wait: bool) -> Path:
        """Begin to save as `name`, and with `wait` see it through; an earlier save is seen through first, since two at once need twice the
        memory and slow each other down.

        Where host memory is short, a rolling checkpoint is saved in place of a permanent one, and training waits instead of going on with a
        copy; both are said. Raises CheckpointError, also for the earlier save, and leaves older checkpoints untouched.
        """
        if self.under_way and not wait:
            self._finish_late_one(progress.step)
        self.wait()
        began = time.perf_counter()
        progress = self._within_memory(name, progress)
        partial = self.store.path / f"{name}.partial"
        with self._whole_or_nothing(partial):
            with self.state.together():
                if self.state.rank == 0:
                    self._begin(name, needed_bytes)
            content = run_content(self._model, self._optimizer, self.state, progress.form)
            share = self._planners[progress.form].plan(content, partial, {"layout": progress.layout, "form": progress.form})
            del content
            tensors, share.tensors = share.tensors, []  # a permanent one's are large, and on the host
        wait = wait or not self.settings.asynchronous or not self._has_room_for_copies(name, tensors)
        if not wait:
            copies = self._memory.copies([tensor for _, tensor in tensors])
            tensors = [(item, copy) for (item, _), copy in zip(tensors, copies, strict=True)]
        facts = {"step": progress.step, "checkpoint": name, "form": progress.form}
        self._save = _Save(partial, progress.as_marker(), facts, share, Writing(share, tensors), began)
        self._waited(began)
        if wait:
            self.wait()
        return self.store.path / name

    def wait(self) -> None:
        """See the save under way through, if there is one. Raises CheckpointError if it fails."""
        if self._save is None:
            return
        began = time.perf_counter()
        while self.state.highest([self.writing]) != [0]:  # and never one long collective call, which would time out
            self._save.writing.wait(_POLL_SECONDS)
        self._waited(began)
        self.finish()

    def finish(self) -> None:
        """Complete the save under way, no rank writing any more. Raises CheckpointError if a rank could not write."""
        save, self._save = self._save, None
        began = time.perf_counter()
        with self._whole_or_nothing(save.partial):
            with self.state.together():
                if save.writing.error:
                    raise CheckpointError(save.writing.error)
            written = self.state.of_all_ranks((save.writing.results, save.writing.hashes))
            with self.state.together(), _os_error_is_checkpoint_error():
                if self.state.rank == 0:
                    final = _complete(self.store, save, written)
        self._stall += (stall := time.perf_counter() - began)
        if self.state.rank == 0 and is_of_a_step(final):
            stall, seconds = save.stall + stall, time.perf_counter() - save.began
            self._tell("saved", **save.facts, stall_seconds=round(stall, 3), seconds=round(seconds, 3))
            self._retire()

    def take_stall(self) -> float:
        """Seconds that training has waited for checkpoints since this was last asked. Not collective."""
        stall, self._stall = self._stall, 0.0
        return stall

    def _waited(self, began: float) -> None:
        seconds = time.perf_counter() - began
        self._save.stall += seconds
        self._stall += seconds

    def _finish_late_one(self, step: int) -> None:
        late = self._save.facts["checkpoint"]
        began = time.perf_counter()
        self.wait()
        seconds = time.perf_counter() - began
        self._tell("save_late", checkpoint=late, step=step, waited_seconds=round(seconds, 3))
        self._warn_once(
            "late",
            f"{self.store.path / late}: still being written when step {step} was to be saved, for which training waited {seconds:.1f} s; a "
            f"larger checkpoint.interval_steps={self.settings.interval_steps} avoids that",
        )

    def _within_memory(self, name: str, progress: Progress) -> Progress:
        """A rolling checkpoint in place of a permanent one for which a host has too little memory."""
        if progress.form == ROLLING:
            return progress
        short = short_of_memory(self.state, gather_bytes(held_params(self._model), self.state.groups.dp_cp.size()))
        if short is None:
            return progress
        self._tell("short_of_memory", checkpoint=name, reason=short, instead=ROLLING)
        self._warn_once(
            PERMANENT,
            f"{self.store.path / name}: saved as a rolling checkpoint, since a permanent one gathers the optimizer state in host "
            f"memory and {short}; more memory, or more tensor or pipeline ranks, allow it",
        )
        return replace(progress, form=ROLLING)

    def _has_room_for_copies(self, name: str, tensors: list[tuple[WriteItem, torch.Tensor]]) -> bool:
        short = short_of_memory(self.state, self._memory.lacking([tensor for _, tensor in tensors]))
        if short is None:
            return True
        self._tell("short_of_memory", checkpoint=name, reason=short, instead="waited")
        self._warn_once(
            "copies",
            f"{self.store.path / name}: training waits while it is written, since a copy in host memory would let it go on and {short}; "
            "more memory allows it, and checkpoint.asynchronous=false is this without asking",
        )
        return False

    def _warn_once(self, kind: str, sentence: str) -> None:
        if self.state.rank == 0 and kind not in self._said:
            self._said.add(kind)
            warnings.warn(f"{sentence} (said once; events.jsonl has all)")

    def _begin(self, name: str, needed_bytes: int) -> None:
        """The folder, and room on the disk; on rank 0."""
        with _os_error_is_checkpoint_error():
            partial = self.store.begin(name)
            if disk_usage(partial).free < needed_bytes and self._removal is not None:
                self._removal.join()
            free = disk_usage(partial).free
        if free < needed_bytes:
            raise CheckpointError(f"it needs {size(needed_bytes)} and the disk has {size(free)} free")

    def _retire(self) -> None:
        """What retention lets go is renamed at once and removed beside training, where it is large."""
        if self._removal is not None:
            self._removal.join()
        try:
            leaving = self.store.retire(self.settings.keep_last)
        except OSError as error:  # the new one is complete: no reason to end the run
            warnings.warn(f"{self.store.path}: older checkpoints cannot be removed ({error.strerror})")
            return
        self._removal = threading.Thread(target=lambda: [self.store.discard(path) for path in leaving], daemon=True)
        self._removal.start()

    @contextlib.contextmanager
    def _whole_or_nothing(self, partial: Path) -> Iterator[None]:
        """A CheckpointError inside, which all ranks raise, becomes the one sentence about this save, and nothing of it is left."""
        try:
            yield
        except CheckpointError as error:
            self._discard(partial)
            newest = self.store.newest()
            kept = f"the newest complete checkpoint is {newest.name}" if newest else "there is no earlier one"
            raise CheckpointError(
                f"{partial.with_suffix('')}: not saved, {error}; {kept}; mend that and run the same command again to resume"
            ) from None

    def _discard(self, partial: Path) -> None:
        if self.state.rank == 0:
            self.store.discard(partial)


def _complete(store: CheckpointStore, save: _Save, written: list[tuple[list, dict[str, str]]]) -> Path:
    """Metadata, hashes, marker, name: rank 0's part. Raises OSError."""
    save.share.finish(save.share.metadata, [results for results, _ in written])
    save_config(CheckpointingConfig("torch_dist", 1), str(save.partial))
    hashes = {name: digest for _, hashes in written for name, digest in hashes.items()}
    mine = {path.name: hash_file(path) for path in save.partial.iterdir() if path.name not in hashes}
    write_hashes(save.partial, hashes | mine | {MARKER: hash_text(save.marker)})
    return store.finish(save.partial, save.marker)


@contextlib.contextmanager
def _os_error_is_checkpoint_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(error.strerror or str(error)) from None
