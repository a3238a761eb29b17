"""Write and read a checkpoint with megatron-core's dist_checkpointing (torch_dist): every rank writes its shards, any layout reads them."""

import contextlib
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from hybrid_megatron.checkpoint.integrity import check_hashes, hash_share, write_hashes
from hybrid_megatron.checkpoint.rng import restore_rng, sharded_rng
from hybrid_megatron.checkpoint.store import CheckpointStore, Progress, read_progress, way_out
from hybrid_megatron.checkpoint.untrusted import no_code_from_files
from hybrid_megatron.checkpoint.writer import noting_write_errors
from hybrid_megatron.config.megatron import sharding_metadata
from hybrid_megatron.errors import CheckpointError
from hybrid_megatron.parallel import ParallelState
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
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
    try:
        with state.together():
            if state.rank == 0:
                _begin(store, name, needed_bytes)
        with state.together():
            _write_shards(_content(model, optimizer, state, loading=False), partial, progress)
        names: list[str] = []
        with state.together(), _os_error_is_checkpoint_error():
            if state.rank == 0:
                save_config(CheckpointingConfig("torch_dist", 1), str(partial))
                names = sorted(path.name for path in partial.iterdir())
        names = state.from_rank_0(names)
        with state.together(), _os_error_is_checkpoint_error():
            mine = hash_share(partial, state, names)
        shares = state.of_all_ranks(mine)
        with state.together(), _os_error_is_checkpoint_error():
            if state.rank == 0:
                write_hashes(partial, shares)
                store.finish(partial, progress)
    except CheckpointError as error:
        if state.rank == 0:
            store.discard(partial)
        newest = store.newest()
        kept = f"the newest complete checkpoint is {newest.name}" if newest else "there is no earlier one"
        raise CheckpointError(
            f"{store.path / name}: not saved, {error}; {kept}; mend that and run the same command again to resume"
        ) from None
    return store.path / name


def load_checkpoint(checkpoint: Path, model: DistributedDataParallel, optimizer: MegatronOptimizer, state: ParallelState) -> Progress:
    """Restore model, optimizer and, under the layout that wrote it, random states; collective. Raises CheckpointError."""
    with state.together():
        progress = read_progress(checkpoint)
        check_hashes(checkpoint, state.rank, state.world_size)
    content = _content(model, optimizer, state, loading=True)
    same_layout = progress.layout == state.layout
    if not same_layout:
        del content["rng"]
    with state.together():
        try:
            with no_code_from_files(), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch's about megatron-core's way of calling it
                loaded = dist_checkpointing.load(content, str(checkpoint))
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
    metadata = sharding_metadata(state.groups.dp_cp)
    weights = model.module.sharded_state_dict(metadata=metadata)
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict({"model": weights}, is_loading=loading, metadata=metadata),
        "rng": sharded_rng(state),
    }


def _begin(store: CheckpointStore, name: str, needed_bytes: int) -> None:
    with _os_error_is_checkpoint_error():
        store.begin(name)
        free = shutil.disk_usage(store.path).free
    if free < needed_bytes:
        raise CheckpointError(f"it needs {_size(needed_bytes)} and the disk has {_size(free)} free")


def _write_shards(content: dict, partial: Path, progress: Progress) -> None:
    """Every rank's shards and, on rank 0, `.metadata`. Collective; raises CheckpointError on the ranks that could not write."""
    with noting_write_errors() as noted:
        request = dist_checkpointing.save(
            content, str(partial), content_metadata={"layout": progress.layout}, async_sharded_save=True, async_strategy="mcore"
        )
        finish_writing, _ = request.finalize_fns  # the second writes metadata.json, on rank 0 while the others wait for it
        request._replace(finalize_fns=[finish_writing]).execute_sync()
    if noted:
        raise CheckpointError(noted[0])


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.2f} MiB"


@contextlib.contextmanager
def _os_error_is_checkpoint_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(error.strerror or str(error)) from None
