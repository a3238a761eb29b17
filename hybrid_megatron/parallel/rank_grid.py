"""Which ranks form which groups, known without starting any: megatron-core's order tensor - context - data - pipeline, tensor innermost."""

from hybrid_megatron.config.schema import ParallelConfig

GPUS_OF_A_NODE = 8


def rank_groups(parallel: ParallelConfig, world_size: int) -> dict[str, list[list[int]]]:
    """Groups of ranks by kind: tensor, context, data, pipeline, and data_context, whose ranks share gradients and optimizer.

    Rank r is r = tensor + T (context + C (data + D pipeline)) of its places, as megatron-core's `initialize_model_parallel` has them.
    `world_size` is a multiple of tensor * context * pipeline.
    """
    sizes = {"tensor": parallel.tensor, "context": parallel.context}
    sizes["data"] = world_size // (parallel.tensor * parallel.context * parallel.pipeline)
    sizes["pipeline"] = parallel.pipeline

    def place(rank: int) -> dict[str, int]:
        places = {}
        for kind, size in sizes.items():
            rank, places[kind] = divmod(rank, size)
        return places

    def groups(*varying: str) -> list[list[int]]:
        """Ranks that differ in these places alone."""
        found: dict[tuple, list[int]] = {}
        for rank in range(world_size):
            same = tuple(number for kind, number in place(rank).items() if kind not in varying)
            found.setdefault(same, []).append(rank)
        return sorted(found.values())

    return {kind: groups(kind) for kind in sizes} | {"data_context": groups("data", "context")}


def within_nodes(groups: list[list[int]]) -> bool:
    """Whether no group reaches over the border between two nodes."""
    return all(len({rank // GPUS_OF_A_NODE for rank in group}) == 1 for group in groups)
