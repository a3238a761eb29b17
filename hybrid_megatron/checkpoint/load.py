"""Read a checkpoint with megatron-core's dist_checkpointing: all of it into a trainer, or the parameters alone."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from hybrid_megatron.checkpoint.choose import Chosen, check_whole
from hybrid_megatron.checkpoint.content import held_params, run_content, sharded_weights
from hybrid_megatron.checkpoint.form import PERMANENT
from hybrid_megatron.checkpoint.host_memory import short_of_memory
from hybrid_megatron.checkpoint.rng import restore_rng
from hybrid_megatron.checkpoint.sizes import scatter_bytes
from hybrid_megatron.checkpoint.store import Progress
from hybrid_megatron.checkpoint.untrusted import no_code_from_files
from hybrid_megatron.errors import CheckpointError
from hybrid_megatron.model.hybrid_model import HybridModel
from hybrid_megatron.model.initialize import sharded_tensors
from hybrid_megatron.parallel import ParallelState
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer


def load_checkpoint(chosen: Chosen, model: list[DistributedDataParallel], optimizer: MegatronOptimizer, state: ParallelState) -> None:
    """Restore model, optimizer and, under the layout that wrote it, random states; collective. Raises CheckpointError."""
    if chosen.progress.form == PERMANENT:
        _warn_if_memory_is_short(chosen.path, model, state)
    content = run_content(model, optimizer, state, chosen.progress.form, loading=True)
    same_layout = chosen.progress.layout == state.layout
    if not same_layout:
        del content["rng"]
    with state.together(), _reading(chosen.path, f"move {chosen.path} away to resume from the one before it"):
        loaded = dist_checkpointing.load(content, str(chosen.path))
    _put([chunk.module for chunk in model], loaded["model"])
    with torch.no_grad():
        optimizer.load_state_dict(loaded["optimizer"])
    if same_layout:
        restore_rng(loaded["rng"])


def _warn_if_memory_is_short(checkpoint: Path, model: list[DistributedDataParallel], state: ParallelState) -> None:
    """The system would kill a process without a word."""
    short = short_of_memory(state, scatter_bytes(held_params(model)))
    if short and state.rank == 0:
        warnings.warn(
            f"{checkpoint}: a permanent checkpoint, of which every rank reads the whole optimizer state into host memory; {short}"
        )


def load_weights(checkpoint: Path, model: list[HybridModel], state: ParallelState, then: str = "give another checkpoint") -> Progress:
    """The parameters alone, from a checkpoint of any form, layout and precision, into the chunks of this rank; collective.

    Raises CheckpointError if a file is damaged, or with the first parameter that the checkpoint lacks, has in another shape, or has beyond
    those of the model, and with the way out, `then`. `model` need be neither wrapped nor have an optimizer; an optimizer with masters of
    its own is built afterwards.
    """
    try:
        progress = check_whole(checkpoint, state)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {then}") from None
    with state.together():
        held = shapes_in(checkpoint)
    mine = {tensor.key: tuple(tensor.global_shape) for tensor in _tensors(model, state)}
    wanted = {name: shape for of_rank in state.of_all_ranks(mine) for name, shape in of_rank.items()}
    check_shapes(f"{checkpoint}: it", wanted, held, f"change the model or {then}")
    content = {"model": sharded_weights(model, state)}
    with state.together(), _reading(checkpoint, then):
        loaded = dist_checkpointing.load(content, str(checkpoint))
    _put(model, loaded["model"])
    return progress


def shapes_in(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """Whole shapes of the parameters that a checkpoint holds, by name. Raises CheckpointError."""
    with _reading(checkpoint, "give another checkpoint"):
        held = dist_checkpointing.load_tensors_metadata(str(checkpoint))
    return {name: tuple(tensor.global_shape) for name, tensor in held.items() if not name.startswith("optimizer.")}


def check_shapes(origin: str, wanted: dict[str, tuple[int, ...]], held: dict[str, tuple[int, ...]], then: str) -> None:
    """Raise CheckpointError with the first parameter of the model that `origin`, as a sentence begins with it, lacks or has in another
    shape, or else the first that it has beyond them."""
    for name, shape in wanted.items():
        if name not in held:
            raise CheckpointError(f"{origin} lacks {name}, which this model has; {then}")
        if held[name] != shape:
            told = f"{origin} holds {name} as {list(held[name])}, and this model has it as {list(shape)}"
            raise CheckpointError(f"{told}; {then}")
    if beyond := sorted(held.keys() - wanted.keys()):
        raise CheckpointError(f"{origin} holds {beyond[0]}, which this model does not have; {then}")


def _tensors(model: list[HybridModel], state: ParallelState) -> list[ShardedTensor]:
    """The shards as they lie in a checkpoint, for their names and shapes."""
    tree = sharded_weights(model, state)
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
