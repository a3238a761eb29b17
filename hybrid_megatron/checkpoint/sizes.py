"""How large a checkpoint is, on disk and in host memory while it is saved, in bytes; closed forms, no torch."""


def checkpoint_bytes(num_params: int, bytes_per_param: int) -> int:
    """On disk: parameters, and float32 master weights and two moments in the optimizer."""
    return num_params * (bytes_per_param + 12)


def gather_bytes(num_params: int, shards: int) -> int:
    """In host memory of each rank while it gathers the optimizer state of a permanent checkpoint, at most; `num_params`: that this rank
    holds, whose state is shared by `shards` ranks.

    megatron-core's DistributedOptimizer.get_parameter_state_dp_zero, which has the whole state on every rank: three tensors in float32,
    the pieces of one of them as they came and joined, those joined before, and this rank's share of all three.
    """
    return 24 * num_params + -(-12 * num_params // shards)


def scatter_bytes(num_params: int) -> int:
    """In host memory of each rank while it reads a permanent checkpoint, at least: the whole optimizer state of its parameters."""
    return 12 * num_params


def size(count: float) -> str:
    """Bytes for a person."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.2f} MiB"
