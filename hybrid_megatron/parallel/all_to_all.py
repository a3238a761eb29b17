"""From a cut over the sequence to a cut over the heads and back (DeepSpeed Ulysses, Jacobs et al., 2023, arXiv 2309.14509).

Each rank gets the whole sample for its share of the heads, so any operation that treats heads alone runs as on one device.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_megatron.parallel.sequence_layout import SequenceLayout, gathered_order


def heads_from_sequence(x: Tensor, layout: SequenceLayout, group: ProcessGroup | None) -> Tensor:
    """[b, s, n, ...], s the local length, to [b, context, n / size, ...] in sequence order: rank r gets the r-th share of the heads."""
    assert x.shape[1] == layout.local_length, f"{x.shape[1]} tokens under a layout of {layout.local_length}"
    assert x.shape[2] % layout.size == 0, f"{x.shape[2]} heads do not divide by {layout.size} context ranks"
    if layout.size == 1:
        return x
    by_rank = _Exchange.apply(torch.stack(x.chunk(layout.size, dim=2)), group)  # [size, b, s, n / size, ...]: of each rank its tokens
    pieces = [piece for tokens in by_rank for piece in tokens.split(layout.chunk_length, dim=1)]
    return torch.cat([pieces[place] for place in gathered_order(layout.size)], dim=1)


def sequence_from_heads(x: Tensor, layout: SequenceLayout, group: ProcessGroup | None) -> Tensor:
    """The inverse: [b, context, n / size, ...] to [b, s, n, ...]."""
    assert x.shape[1] == layout.context, f"{x.shape[1]} tokens in a sample of {layout.context}"
    if layout.size == 1:
        return x
    tokens = torch.stack([SequenceLayout(layout.context, layout.size, rank).local(x) for rank in range(layout.size)])
    return torch.cat(_Exchange.apply(tokens, group).unbind(), dim=2)


class _Exchange(torch.autograd.Function):
    """x [size, ...]: part r goes to rank r; part r of the result came from rank r. The gradient goes the same way back."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x, group=group)
        return y

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradient.contiguous(), ctx.group), None
