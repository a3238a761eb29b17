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
from hybrid_megatron.model.hybrid_model import HybridModel
from hybrid_megatron.model.initialize import sharded_tensors
from hybrid_megatron.parallel import ParallelState
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer


def save_checkpoint(
    store: CheckpointStore,
    name: str,
    model: list[DistributedDataParallel],
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


def load_checkpoint(checkpoint: Path, model: list[DistributedDataParallel], optimizer: MegatronOptimizer, state: ParallelState) -> Progress:
    """Restore model, optimizer and, under the layout that wrote it, random states; collective. Raises CheckpointError."""
    with state.together():
        progress = read_progress(checkpoint)
        check_hashes(checkpoint, state.rank, state.world_size)
    content = _content(model, optimizer, state, loading=True)
    same_layout = progress.layout == state.layout
    if not same_layout:
        del content["rng"]
    with state.together(), _reading(checkpoint, way_out(checkpoint)):
        loaded = dist_checkpointing.load(content, str(checkpoint))
    _put([chunk.module for chunk in model], loaded["model"])
    with torch.no_grad():
        optimizer.load_state_dict(loaded["optimizer"])
    if same_layout:
        restore_rng(loaded["rng"])
    return progress


def load_weights(checkpoint: Path, model: list[HybridModel], state: ParallelState) -> Progress:
    """The parameters alone, from a checkpoint of any layout and precision, into the chunks of this rank; collective.

    Raises CheckpointError if a file is damaged, or with the first parameter that the checkpoint lacks, has in another shape, or has beyond
    those of the model. `model` need be neither wrapped nor have an optimizer; an optimizer with masters of its own is built afterwards.
    """
    then = "give another checkpoint"
    with state.together():
        progress = read_progress(checkpoint, then)
        check_hashes(checkpoint, state.rank, state.world_size, then)
    with state.together(), _reading(checkpoint, then):
        held = dist_checkpointing.load_tensors_metadata(str(checkpoint))
    shapes = {name: tuple(tensor.global_shape) for name, tensor in held.items() if not name.startswith("optimizer.")}
    names = set()
    with state.together():
        for tensor in _tensors(model, state):
            names.add(tensor.key)
            _check_parameter(checkpoint, tensor.key, tuple(tensor.global_shape), shapes)
    beyond = sorted(shapes.keys() - set().union(*state.of_all_ranks(names)))
    if beyond:
        raise CheckpointError(f"{checkpoint}: it holds {beyond[0]}, which this model does not have; change the model or {then}")
    content = {"model": _sharded(model, state)}
    with state.together(), _reading(checkpoint, then):
        loaded = dist_checkpointing.load(content, str(checkpoint))
    _put(model, loaded["model"])
    return progress


def _check_parameter(checkpoint: Path, name: str, shape: tuple[int, ...], shapes: dict[str, tuple[int, ...]]) -> None:
    problem = None
    if name not in shapes:
        problem = f"it lacks {name}, which this model has"
    elif shapes[name] != shape:
        problem = f"it holds {name} as {list(shapes[name])}, and this model has it as {list(shape)}"
    if problem:
        raise CheckpointError(f"{checkpoint}: {problem}; change the model or give another checkpoint")


def checkpoint_bytes(num_params: int, bytes_per_param: int) -> int:
    """Size on disk: parameters, and float32 master weights and two moments in the optimizer."""
    return num_params * (bytes_per_param + 12)


def _content(model: list[DistributedDataParallel], optimizer: MegatronOptimizer, state: ParallelState, *, loading: bool) -> dict:
    metadata = sharding_metadata(state.groups.dp_cp)
    weights = _sharded([chunk.module for chunk in model], state)
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict({"model": weights}, is_loading=loading, metadata=metadata),
        "rng": sharded_rng(state),
    }


def _sharded(model: list[HybridModel], state: ParallelState) -> dict:
    """Shards of all chunks. Their global names tell where they belong; the number of the chunk only keeps equal local names apart."""
    metadata = sharding_metadata(state.groups.dp_cp)
    return {str(number): chunk.sharded_state_dict(metadata=metadata) for number, chunk in enumerate(model)}


def _tensors(model: list[HybridModel], state: ParallelState) -> list[ShardedTensor]:
    """The shards as they lie in a checkpoint, for their names and shapes."""
    tree = _sharded(model, state)
    apply_factories(tree)
    return sharded_tensors(tree)


def _put(model: list[HybridModel], loaded: dict) -> None:
    for number, chunk in enumerate(model):
        chunk.load_state_dict(loaded[str(number)])


@contextlib.contextmanager
def _reading(checkpoint: Path, then: str) -> Iterator[None]:
    """Whatever goes wrong inside becomes a CheckpointError with the advice `then`; no code from the files is run."""
    try:
        with no_code_from_files(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's about megatron-core's way of calling it
            yield
    except Exception as error:  # megatron-core, torch and pickle each have exceptions of their own for a damaged file
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise CheckpointError(f"{checkpoint}: damaged or not of this model ({reason}); {then}") from error


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
