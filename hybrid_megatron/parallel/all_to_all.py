"""From a cut of the sequence to a cut of the heads and back, by one all-to-all over the context ranks.

A rank holds its own chunks of all heads, or the whole sample of its share of the heads. Between the two every rank sends
(size - 1) / size of what it holds. Differentiable: the backward pass of each is the other.
"""

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
    chunks = by_source.unflatten(2, (-1, layout.chunk_length)).movedim(0, 1).flatten(1, 2)
    return chunks[:, gathered_order(layout.size)].flatten(1, 2)


def sequence_from_heads(x: Tensor, layout: SequenceLayout, group: ProcessGroup) -> Tensor:
    """[b, context, n / size, ...] -> [b, local_length, n, ...]: the inverse of `heads_from_sequence`."""
    if layout.size == 1:
        return x
    assert x.shape[1] == layout.context, f"{x.shape[1]} tokens under a layout of {layout.context}"
    held = [chunk for rank in range(layout.size) for chunk in chunks_of(rank, layout.size)]
    chunks = x.unflatten(1, (-1, layout.chunk_length))[:, held]
    by_owner = chunks.unflatten(1, (layout.size, -1)).movedim(1, 0).flatten(2, 3)
    by_source = all_to_all(group, by_owner.contiguous())  # [size, b, local_length, n / size, ...]
    return by_source.movedim(0, 2).flatten(2, 3)
