"""From a cut of the sequence to a cut of the heads and back, by one all-to-all over the context ranks.

A rank holds its own chunks of all heads, or the whole sample of its share of the heads. Between the two every rank sends
(size - 1) / size of what it holds. Differentiable: the backward pass of each is the other.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_megatron.parallel.sequence_layout import SequenceLayout, chunks_of, gathered_order
from megatron.core.tensor_parallel.mappings import all_to_all


def heads_from_sequence(x: Tensor, layout: SequenceLayout, group: ProcessGroup) -> Tensor:
    """[b, local_length, n, ...] -> [b, context, n / size, ...] in sequence order: this rank's block of heads, n a multiple of size."""
    if layout.size == 1:
        return x
    assert x.shape[2] % layout.size == 0, f"{x.shape[2]} heads over {layout.size} context ranks"
    by_owner = x.unflatten(2, (layout.size, -1)).movedim(2, 0)
    by_source = all_to_all(group, by_owner.contiguous())  # [size, b, local_length, n / size, ...]
    # Pieces, not an index: the gradient of an index over a few large slices takes CUDA seconds.
    chunks = [chunk for source in by_source for chunk in source.split(layout.chunk_length, dim=1)]
    return torch.cat([chunks[place] for place in gathered_order(layout.size)], dim=1)


def sequence_from_heads(x: Tensor, layout: SequenceLayout, group: ProcessGroup) -> Tensor:
    """[b, context, n / size, ...] -> [b, local_length, n, ...]: the inverse of `heads_from_sequence`."""
    if layout.size == 1:
        return x
    assert x.shape[1] == layout.context, f"{x.shape[1]} tokens under a layout of {layout.context}"
    chunks = x.split(layout.chunk_length, dim=1)
    by_owner = torch.stack([torch.cat([chunks[chunk] for chunk in chunks_of(rank, layout.size)], dim=1) for rank in range(layout.size)])
    by_source = all_to_all(group, by_owner)  # [size, b, local_length, n / size, ...]
    return by_source.movedim(0, 2).flatten(2, 3)
