"""RWKV's token shift: projections whose input is mixed, channel by channel, with that of the token before.

    y_i = W_i (x_t + m_i (x_{t-1} - x_t))        for several i, each with its own mix m_i and matrix W_i

Zeros stand before the sample and before each document. Mixing before the projection takes no further product of matrices; as two
projections of one input, W_i (1 - m_i) x_t + W_i m_i x_{t-1}, it would take twice as many. It takes memory traffic instead: with n mixes
2 (n + 4) h bytes a token in bf16 forward and about 2 (2 n + 12) h backward, where they are computed again: x alone is kept.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_megatron.ops.fused import fused
from hybrid_megatron.parallel import SequenceLayout
from hybrid_megatron.parallel.halo import preceding_tokens


def shifted_projections(
    x: Tensor, mixes: Tensor, weights: tuple[Tensor, ...], layout: SequenceLayout, context_group: ProcessGroup | None
) -> tuple[Tensor, ...]:
    """For each weight [out, h] its projection [b, s, out]; x [b, s, h], s the local length, mixes [len(weights), h].

    With context parallelism the one token before each chunk is exchanged.
    """
    halos = preceding_tokens(x, 1, layout, context_group)
    first = torch.cat([halo if halo.shape[1] else x.new_zeros(x.shape[0], 1, x.shape[2]) for halo in halos], dim=1)
    return _ShiftedProjections.apply(x, first, layout.local_document_starts(), mixes, *weights)


class _ShiftedProjections(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, first: Tensor, starts: Tensor | None, mixes: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, first, starts, mixes, *weights)
        return tuple(F.linear(mixed, weight) for mixed, weight in zip(_mixed(x, _before(x, first, starts), mixes), weights))

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        x, first, starts, mixes, *weights = ctx.saved_tensors
        before = _before(x, first, starts)
        mixed = list(_mixed(x, before, mixes))
        of_weights, of_mixed = [], []
        for i, (gradient, weight) in enumerate(zip(gradients, weights)):
            of_weights.append(gradient.flatten(0, 1).T @ mixed[i].flatten(0, 1))
            of_mixed.append(gradient @ weight)
            mixed[i] = None  # its gradient takes its place
        of_x, of_before, of_mixes = _mixed_backward(x, before, mixes, *of_mixed)
        if starts is not None:
            of_before.masked_fill_(starts[..., None], 0.0)
        firsts = of_before[:, :: x.shape[1] // first.shape[1]]
        of_first = firsts.clone()
        firsts.zero_()
        of_x[:, :-1] += of_before[:, 1:]
        return of_x, of_first, None, of_mixes, *of_weights


def _before(x: Tensor, first: Tensor, starts: Tensor | None) -> Tensor:
    """The token before each one of x [b, s, h]: `first` [b, chunks, h] before the chunks that s consists of, zeros at document starts."""
    before = x.new_empty(x.shape)
    before[:, 1:] = x[:, :-1]
    before[:, :: x.shape[1] // first.shape[1]] = first
    return before if starts is None else before.masked_fill_(starts[..., None], 0.0)


@fused
def _mixed(x: Tensor, before: Tensor, mixes: Tensor) -> tuple[Tensor, ...]:
    """x + m (before - x) for each row m of mixes, in float32 or wider and then as x is; each lies token after token."""
    wide = torch.promote_types(x.dtype, torch.float32)
    here, change = x.to(wide), before.to(wide) - x.to(wide)
    return tuple([(here + mix * change).to(x.dtype).contiguous() for mix in mixes.to(wide)])


@fused
def _mixed_backward(x: Tensor, before: Tensor, mixes: Tensor, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of what is before, and of mixes, from those of `_mixed`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    change = before.to(wide) - x.to(wide)
    wide_gradients = [gradient.to(wide) for gradient in gradients]
    of_before = sum([mix * gradient for mix, gradient in zip(mixes.to(wide), wide_gradients)])
    of_mixes = torch.stack([(change * gradient).sum((0, 1)) for gradient in wide_gradients])
    return (sum(wide_gradients) - of_before).to(x.dtype), of_before.to(x.dtype), of_mixes.to(mixes.dtype)
