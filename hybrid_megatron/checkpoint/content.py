"""What a checkpoint holds, as a tree of shards: parameters, optimizer state, random states."""

from hybrid_megatron.checkpoint.form import OPTIMIZER_SHARDING
from hybrid_megatron.checkpoint.rng import sharded_rng
from hybrid_megatron.config.megatron import sharding_metadata
from hybrid_megatron.model.hybrid_model import HybridModel
from hybrid_megatron.parallel import ParallelState
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer


def run_content(
    model: list[DistributedDataParallel], optimizer: MegatronOptimizer, state: ParallelState, form: str, *, loading: bool = False
) -> dict:
    """All that a run resumes from. Collective, and for saving in the permanent form it gathers the optimizer state over the data ranks."""
    for part in [] if loading else optimizer.chained_optimizers:
        part.init_state_fn(part.optimizer, part.config)  # before the first step there are no moments: they are zero
    weights = sharded_weights([chunk.module for chunk in model], state)
    metadata = sharding_metadata(state.groups.dp_cp, OPTIMIZER_SHARDING[form])
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict({"model": weights}, is_loading=loading, metadata=metadata),
        "rng": sharded_rng(state),
    }


def held_params(model: list[DistributedDataParallel]) -> int:
    """Parameters of this rank, with the padding between them in megatron-core's buffers."""
    return sum(buffer.numel for chunk in model for buffer in chunk.buffers)


def sharded_weights(chunks: list[HybridModel], state: ParallelState) -> dict:
    """Shards of all chunks. Their global names tell where they belong; the number of the chunk only keeps equal local names apart."""
    metadata = sharding_metadata(state.groups.dp_cp)
    return {str(number): chunk.sharded_state_dict(metadata=metadata) for number, chunk in enumerate(chunks)}
