"""megatron-core's `dp_reshardable` sharding, the rolling form, where its own code is not enough.

A buffer of parameters is cut into equal shares over the data (and context) ranks, whatever lies at the cuts, so a share may hold nothing
but the padding between parameters: a bfloat16 model with few float32 decays has a small buffer of them, in which each starts at a
multiple of 64 elements. megatron-core asserts that there is no such share. It also leaves padding as it was allocated: what happened to
lie in memory would be written out, and two checkpoints of one state would differ.

And it writes a tensor for each bucket that gradients are reduced in, so that a run with other buckets, as another number of ranks has,
could not resume. Buckets lie in a buffer without a gap (training/buckets.py): here a checkpoint has one tensor for the buffer.
"""

import torch

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def mend_dp_reshardable(optimizer: DistributedOptimizer) -> None:
    """Let every share be saved and loaded, all padding be zero, and a checkpoint not depend on the buckets."""
    for sizes in (optimizer.per_bucket_numel, optimizer.per_bucket_numel_unpadded):  # written, and compared when read
        sizes[:] = [{dtype: [sum(buckets)] for dtype, buckets in of_buffer.items()} for of_buffer in sizes]
    plain_state = optimizer.get_parameter_state_dp_reshardable
    plain_shards = optimizer.sharded_param_state_dp_reshardable

    def state() -> dict:
        held = plain_state()
        for number, ranges in enumerate(optimizer.gbuf_ranges):
            for dtype in ranges:
                for bucket, parameters in enumerate(held[number][dtype]):
                    if not parameters:
                        parameters.append(_share_of_padding(optimizer, number, bucket))
        return held

    def shards(*arguments, **named) -> dict:
        held = plain_shards(*arguments, **named)
        for number, ranges in enumerate(optimizer.gbuf_ranges):
            for dtype in ranges:
                for bucket, parameters in enumerate(held[number][dtype]):
                    for part in parameters:
                        _zero_padding(part)
                        _place_in_buffer(part, optimizer.buffers[number], bucket)
        return held

    optimizer.get_parameter_state_dp_reshardable = state
    optimizer.sharded_param_state_dp_reshardable = shards


def _share_of_padding(optimizer: DistributedOptimizer, number: int, bucket: int) -> dict:
    """This rank's share of a bucket in which no parameter lies, as the entries of parameters are; at the end of the buffer it is empty."""
    group, whole = optimizer.data_parallel_group, optimizer.buffers[number].buckets[bucket]
    share = whole.grad_data.numel() // group.size()
    length = min(max(whole.numel_unpadded - group.rank() * share, 0), share)
    keys = ("param", *optimizer.optimizer_state_keys) if length else ()
    tensors = {key: torch.zeros(length, dtype=torch.float32, device=whole.grad_data.device) for key in keys}
    return {**tensors, "gbuf_local_start": 0, "gbuf_local_end": length, "padding": True}


def _zero_padding(part: dict) -> None:
    if part["padding"].unwrap():
        for shard in nested_values(part):
            if isinstance(shard, ShardedTensor):
                shard.data.zero_()


def _place_in_buffer(part: dict, buffer: _ParamAndGradBuffer, bucket: int) -> None:
    """As if the buffer were one bucket."""
    for shard in nested_values(part):
        if isinstance(shard, ShardedTensor):
            shard.key = shard.key.replace(f".bucket_idx_{bucket}.", ".bucket_idx_0.")
            shard.global_shape = (buffer.numel_unpadded,)
            shard.global_offset = (shard.global_offset[0] + buffer.buckets[bucket].offset,)
