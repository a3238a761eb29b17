"""Where the gradient buffers are cut into buckets, each of which is reduced as soon as the backward pass has filled it.

megatron-core begins every bucket at a multiple of the number of ranks, with padding before it, so that places in the buffer depend on the
buckets. Its permanent form of a checkpoint reads a buffer of several buckets as if there were no such padding, and would hold other
parameters' state. Here a buffer is laid out as one bucket and cut where a multiple of the number of ranks lies between two parameters
anyway: nothing moves, and neither memory nor a checkpoint depends on the buckets.
"""

import dataclasses

from torch import nn

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_layout import FullParamLayout, PerBufferParamLayout, bucket_end_divisor


def bucketed_layout(chunk: nn.Module, ranks: int, ddp: DistributedDataParallelConfig) -> FullParamLayout:
    """Of the buffers of a chunk's parameters over `ranks` of data times context: buckets of at least `ddp.bucket_size` elements, or one."""
    params = [parameter for parameter in chunk.parameters() if parameter.requires_grad]
    whole = DistributedOptimizer.compute_full_param_layout(params, None, ranks, ddp)
    if ddp.bucket_size is None:
        return whole
    return FullParamLayout({key: _cut(layout, ddp.bucket_size, bucket_end_divisor(ranks, False)) for key, layout in whole.layouts.items()})


def _cut(layout: PerBufferParamLayout, size: int, divisor: int) -> PerBufferParamLayout:
    """A bucket ends where the next parameter begins, and holds the few elements of padding before it."""
    borders, places = [0], {}
    for parameter, (start, end, _) in layout.param_index_map.items():
        if start - borders[-1] >= size and start % divisor == 0:
            borders.append(start)
        places[parameter] = start, end, len(borders) - 1
    [(_, padded_end)], [end] = layout.bucket_indices, layout.per_bucket_numel_unpadded
    return dataclasses.replace(
        layout,
        param_index_map=places,
        bucket_indices=list(zip(borders, [*borders[1:], padded_end])),
        per_bucket_numel_unpadded=[stop - start for start, stop in zip(borders, [*borders[1:], end])],
    )
