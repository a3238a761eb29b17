"""RWKV's token shift: projections whose input is mixed, channel by channel, with that of the token before.

    y_i = W_i (x_t + m_i (x_{t-1} - x_t))        for several i, each with its own mix m_i and matrix W_i

Zeros stand before the sample and before each document. Mixing before the projection takes no further product of matrices; as two
projections of one input, W_i (1 - m_i) x_t + W_i m_i x_{t-1}, it would take twice as many. It takes memory traffic instead: with n mixes
and one Triton kernel each way on CUDA 2 (n + 1) h bytes a token in bf16 forward and 2 (2 n + 3) h backward, where they are computed again:
x alone is kept.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_megatron.ops.by_kernel import by_kernel
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
        return tuple(F.linear(mixed, weight) for mixed, weight in zip(_mixed(x, first, starts, mixes), weights))

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        x, first, starts, mixes, *weights = ctx.saved_tensors
        rows = _mixed(x, first, starts, mixes).flatten(1, 2)
        of_weights = []
        for gradient, weight, mixed in zip(gradients, weights, rows):
            gradient = gradient.flatten(0, 1)
            of_weights.append(gradient.T @ mixed)
            torch.mm(gradient, weight, out=mixed)  # its gradient takes its place
        of_x, of_first, of_mixes = _mixed_backward(rows.unflatten(1, x.shape[:2]), x, first, starts, mixes)
        return of_x, of_first, None, of_mixes, *of_weights


def _mixed(x: Tensor, first: Tensor, starts: Tensor | None, mixes: Tensor) -> Tensor:
    """x + m (before - x) for each row m of mixes, in float32 or wider and then as x is: [mixes, b, s, h], contiguous.

    Before a token stands the one before it in x [b, s, h], `first` [b, chunks, h] before the chunks that s consists of, zeros at `starts`.
    """
    if by_kernel(x):
        from hybrid_megatron.ops.kernels.token_shift import mixed

        return mixed(x, first, starts, mixes)
    wide = torch.promote_types(x.dtype, torch.float32)
    here, change = x.to(wide), _before(x, first, starts).to(wide) - x.to(wide)
    return (here + mixes.to(wide)[:, None, None] * change).to(x.dtype).contiguous()


def _mixed_backward(gradients: Tensor, x: Tensor, first: Tensor, starts: Tensor | None, mixes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, first and mixes, from those of `_mixed`."""
    if by_kernel(x):
        from hybrid_megatron.ops.kernels import token_shift as kernels

        return kernels.gradients(gradients, x, first, starts, mixes)
    wide = torch.promote_types(x.dtype, torch.float32)
    gradients, change = gradients.to(wide), _before(x, first, starts).to(wide) - x.to(wide)
    of_before = (mixes.to(wide)[:, None, None] * gradients).sum(0)
    of_x, of_mixes = gradients.sum(0) - of_before, (change * gradients).sum((1, 2))
    if starts is not None:
        of_before.masked_fill_(starts[..., None], 0.0)
    firsts = of_before[:, :: x.shape[1] // first.shape[1]]
    of_first = firsts.clone()
    firsts.zero_()
    of_x[:, :-1] += of_before[:, 1:]
    return of_x.to(x.dtype), of_first.to(first.dtype), of_mixes.to(mixes.dtype)


def _before(x: Tensor, first: Tensor, starts: Tensor | None) -> Tensor:
    before = x.new_empty(x.shape)
    before[:, 1:] = x[:, :-1]
    before[:, :: x.shape[1] // first.shape[1]] = first
    return before if starts is None else before.masked_fill_(starts[..., None], 0.0)
