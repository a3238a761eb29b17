"""How megatron-core's dist_checkpointing is to shard this project's states; one choice for saving, loading and initialising."""

from hybrid_megatron.parallel import ParallelState


def sharding_metadata(state: ParallelState) -> dict:
    """`fully_reshardable`: the optimizer state moves between layouts. `non_homogeneous_layers`: layers of one model may differ."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "non_homogeneous_layers": True,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": state.groups.dp_cp,
    }
