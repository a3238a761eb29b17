"""Write and read a checkpoint with megatron-core's dist_checkpointing (torch_dist): every rank writes its shards, any layout reads them."""

import errno
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from hybrid_megatron.checkpoint.metadata import sharding_metadata
from hybrid_megatron.checkpoint.rng import restore_rng, sharded_rng
from hybrid_megatron.checkpoint.store import CheckpointStore, Progress, read_progress, way_out
from hybrid_megatron.errors import CheckpointError
from hybrid_megatron.parallel import ParallelState
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer


def save_checkpoint(
    store: CheckpointStore,
    name: str,
    model: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    progress: Progress,
    state: ParallelState,
    needed_bytes: int,
) -> Path:
    """Save as `name` with SHA-256 hashes of all files; collective. Raises CheckpointError and leaves older checkpoints untouched."""
    partial = store.path / f"{name}.partial"
    problem = None
    if state.rank == 0:
        try:
            store.begin(name)
            free = shutil.disk_usage(store.path).free
            if free < needed_bytes:
                problem = f"the checkpoint needs {needed_bytes / 2**30:.2f} GiB and the disk has {free / 2**30:.2f} GiB free"
        except OSError as error:
            problem = error.strerror
    _agree(problem, store, partial)

    content = _content(model, optimizer, state, loading=False)
    try:
        dist_checkpointing.save(content, str(partial), content_metadata={"layout": progress.layout}, verify_integrity=True)
        if state.rank == 0:
            store.finish(partial, progress)
    except Exception as error:  # torch wraps what a writer raised in exceptions of its own
        cause = _os_error(error)
        if cause is None:
            raise
        problem = cause.strerror
    _agree(problem, store, partial)
    return store.path / name


def load_checkpoint(checkpoint: Path, model: DistributedDataParallel, optimizer: MegatronOptimizer, state: ParallelState) -> Progress:
    """Restore model, optimizer and, under the layout that wrote it, random states; collective. Raises CheckpointError."""
    progress = read_progress(checkpoint)
    content = _content(model, optimizer, state, loading=True)
    same_layout = progress.layout == state.layout
    if not same_layout:
        del content["rng"]
    try:
        loaded = dist_checkpointing.load(content, str(checkpoint), verify_integrity=True)
    except Exception as error:  # megatron-core, torch and pickle each have exceptions of their own for a damaged file
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise CheckpointError(f"{checkpoint}: damaged or not of this model ({reason}); {way_out(checkpoint)}") from error
    model.module.load_state_dict(loaded["model"])
    with torch.no_grad():
        optimizer.load_state_dict(loaded["optimizer"])
    if same_layout:
        restore_rng(loaded["rng"])
    return progress


def checkpoint_bytes(num_params: int, bytes_per_param: int) -> int:
    """Size on disk: parameters, and float32 master weights and two moments in the optimizer."""
    return num_params * (bytes_per_param + 12)


def _content(model: DistributedDataParallel, optimizer: MegatronOptimizer, state: ParallelState, *, loading: bool) -> dict:
    metadata = sharding_metadata(state)
    weights = model.module.sharded_state_dict(metadata=metadata)
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict({"model": weights}, is_loading=loading, metadata=metadata),
        "rng": sharded_rng(state),
    }


def _agree(problem: str | None, store: CheckpointStore, partial: Path) -> None:
    """Every rank raises if one has a problem; rank 0 removes what was begun."""
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    found = next((each for each in problems if each), None)
    if found is None:
        return
    if dist.get_rank() == 0:
        store.discard(partial)
    newest = store.newest()
    kept = f"the newest complete checkpoint is {newest.name}" if newest else "there is no earlier one"
    raise CheckpointError(f"{partial.with_suffix('')}: not saved, {found}; {kept}; make room and run the same command again to resume")


def _os_error(error: BaseException | None) -> OSError | None:
    """The OSError at the bottom of a chain of exceptions, or one that its text tells of (a writer process passes on text alone)."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError):
            return error
        for code in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS):
            if f"[Errno {code}]" in str(error):
                return OSError(code, os.strerror(code))
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
