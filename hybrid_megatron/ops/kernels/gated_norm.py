"""The output stage of gated_norm.py as Triton kernels: o, z and the gradient are read once, computed in float32, and the results written
once. The backward pass computes the root mean squares again.

A program takes rows in the order of tokens and of heads within them, so that any number of heads fills it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_megatron.ops.gradient_place import place_of_gradient
from hybrid_megatron.ops.kernels.row_layout import dense_rows, empty_for_gradient, empty_like, steps_between_rows

_ROWS = 16  # of a program at once
_PROGRAMS = 1024  # about as many in the backward pass: each has a sum of its own for the weight


@triton.jit
def _at(x, batch, row, column, batch_stride, token_stride, head_stride, heads: tl.constexpr, STEP: tl.constexpr):
    """Where row `row` of sample `batch` lies, as the rows of tokens and heads are counted."""
    token = row // heads
    head = row - token * heads
    return x + (batch * batch_stride + token.to(tl.int64) * token_stride + head * head_stride) * STEP + column


@triton.jit
def _norm_gated(
    o, weight, z, out, rows, width, eps,
    o_batch, o_token, o_head, z_batch, z_token, z_head, out_batch, out_token, out_head,
    heads: tl.constexpr, SILU: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program ROWS of the `rows` rows of a sample; the gate is sigmoid(z), and z times that if SILU."""
    batch = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (column < width)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    values = tl.load(_at(o, batch, row, column, o_batch, o_token, o_head, heads, STEP), mask=inside, other=0.0).to(tl.float32)
    opening = tl.load(_at(z, batch, row, column, z_batch, z_token, z_head, heads, STEP), mask=inside, other=0.0).to(tl.float32)
    gate = tl.sigmoid(opening)
    if SILU:
        gate = gate * opening
    inverse = tl.rsqrt(tl.sum(values * values, axis=1) / width + eps)[:, None]
    target = _at(out, batch, row, column, out_batch, out_token, out_head, heads, STEP)
    tl.store(target, (values * inverse * w * gate).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_gated_gradients(
    grad, o, weight, z, of_o, of_z, sums, rows, rows_each, width, eps,
    grad_batch, grad_token, grad_head, o_batch, o_token, o_head, z_batch, z_token, z_head,
    of_o_batch, of_o_token, of_o_head, of_z_batch, of_z_token, of_z_head,
    heads: tl.constexpr, SILU: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program `rows_each` (a multiple of ROWS) of the rows of a sample, ROWS after ROWS."""
    batch = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, WIDTH)[None, :]
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    begin = tl.program_id(0) * rows_each
    for first in range(begin, tl.minimum(begin + rows_each, rows), ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        inside = (row < rows) & (column < width)
        g = tl.load(_at(grad, batch, row, column, grad_batch, grad_token, grad_head, heads, STEP), mask=inside, other=0.0).to(tl.float32)
        values = tl.load(_at(o, batch, row, column, o_batch, o_token, o_head, heads, STEP), mask=inside, other=0.0).to(tl.float32)
        opening = tl.load(_at(z, batch, row, column, z_batch, z_token, z_head, heads, STEP), mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(opening)
        gate, slope = sigmoid, sigmoid * (1 - sigmoid)
        if SILU:
            gate, slope = opening * sigmoid, sigmoid * (1 + opening * (1 - sigmoid))
        inverse = tl.rsqrt(tl.sum(values * values, axis=1) / width + eps)[:, None]
        normalised, of_norm = values * inverse, g * gate
        mean = (tl.sum(of_norm * w * normalised, axis=1) / width)[:, None]
        target = _at(of_o, batch, row, column, of_o_batch, of_o_token, of_o_head, heads, STEP)
        tl.store(target, (inverse * (of_norm * w - normalised * mean)).to(of_o.dtype.element_ty), mask=inside)
        target = _at(of_z, batch, row, column, of_z_batch, of_z_token, of_z_head, heads, STEP)
        tl.store(target, (g * normalised * w * slope).to(of_z.dtype.element_ty), mask=inside)
        total += of_norm * normalised
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    channel = tl.arange(0, WIDTH)
    tl.store(sums + program * width + channel, tl.sum(total, axis=0), mask=channel < width)


def _constants(heads: int, width: int, gate: str, step: int) -> dict[str, int | bool]:
    assert gate in ("sigmoid", "silu"), gate
    return dict(heads=heads, SILU=gate == "silu", STEP=step, ROWS=_ROWS, WIDTH=triton.next_power_of_2(width), num_warps=4)


def forward(o: Tensor, weight: Tensor, z: Tensor, eps: float, gate: str) -> Tensor:
    """[b, s, n, d], sequence first in memory."""
    o, weight, z = dense_rows(o), weight.contiguous(), dense_rows(z)
    batch, tokens, heads, width = o.shape
    out = empty_like(o, sequence_first=True)
    step, strides = steps_between_rows(o, z, out)
    _norm_gated[(triton.cdiv(tokens * heads, _ROWS), batch)](
        o, weight, z, out, tokens * heads, width, eps, *strides, **_constants(heads, width, gate, step)
    )
    return out


def gradients(grad: Tensor, o: Tensor, weight: Tensor, z: Tensor, of_z: Tensor, eps: float, gate: str) -> tuple[Tensor, Tensor, Tensor]:
    """Of o (batch first), weight and z (written to of_z), from that of the output [b, s, n, d]."""
    grad, o, weight, z = dense_rows(grad), dense_rows(o), weight.contiguous(), dense_rows(z)
    batch, tokens, heads, width = o.shape
    of_o = empty_like(o, sequence_first=False)
    step, strides = steps_between_rows(grad, o, z, of_o, of_z)
    rows_each = triton.cdiv(triton.cdiv(batch * tokens * heads, _PROGRAMS), _ROWS) * _ROWS
    grid = triton.cdiv(tokens * heads, rows_each), batch
    sums = torch.empty(grid[0] * batch, width, dtype=torch.float32, device=o.device)
    _norm_gated_gradients[grid](
        grad, o, weight, z, of_o, of_z, sums, tokens * heads, rows_each, width, eps, *strides, **_constants(heads, width, gate, step)
    )
    return of_o, sums.sum(0).to(weight.dtype), of_z


class GatedNorm(torch.autograd.Function):
    """o, z [b, s, n, d] and weight [d] -> [b, s, n, d]. Keeps its inputs alone."""

    @staticmethod
    def forward(ctx, o: Tensor, weight: Tensor, z: Tensor, eps: float, gate: str) -> Tensor:
        ctx.save_for_backward(o, weight, z)
        ctx.eps, ctx.gate, ctx.place = eps, gate, place_of_gradient(z)
        return forward(o, weight, z, eps, gate)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_z = empty_for_gradient(ctx.saved_tensors[2], ctx.place)
        return *gradients(grad, *ctx.saved_tensors, of_z, ctx.eps, ctx.gate), None, None
