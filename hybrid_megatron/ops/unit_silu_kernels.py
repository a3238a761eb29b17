"""The row-wise SiLU and L2 norm of unit_silu.py as Triton kernels: each row is read once, computed in float32, and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 16  # of a program
SMALLEST: tl.constexpr = tl.constexpr(1e-12)
"""A norm below it counts as this, as in torch.nn.functional.normalize."""


@triton.jit
def _rows(x, heads, width, stride_batch, stride_token, stride_head, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """This program's rows of x [HEADS, WIDTH], where they are, and whether: (values, row, column, inside)."""
    row = (tl.program_id(2) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < heads) & (column < width)
    at = tl.program_id(1).to(tl.int64) * stride_batch + tl.program_id(0).to(tl.int64) * stride_token + row * stride_head + column
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32), row, column, inside


@triton.jit
def _forward(
    x, out, tokens, heads, width, stride_batch, stride_token, stride_head, HEADS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """A program a token and HEADS heads; the output is contiguous."""
    values, row, column, inside = _rows(x, heads, width, stride_batch, stride_token, stride_head, HEADS, WIDTH)
    y = values * tl.sigmoid(values)
    norm = tl.maximum(tl.sqrt(tl.sum(y * y, axis=1)), SMALLEST)[:, None]
    target = out + ((tl.program_id(1).to(tl.int64) * tokens + tl.program_id(0)) * heads + row) * width + column
    tl.store(target, (y / norm).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad, x, out, tokens, heads, width, grad_batch, grad_token, grad_head, stride_batch, stride_token, stride_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    g, row, column, inside = _rows(grad, heads, width, grad_batch, grad_token, grad_head, HEADS, WIDTH)
    values, row, column, inside = _rows(x, heads, width, stride_batch, stride_token, stride_head, HEADS, WIDTH)
    sigmoid = tl.sigmoid(values)
    y = values * sigmoid
    norm = tl.sqrt(tl.sum(y * y, axis=1))[:, None]
    unit = y / tl.maximum(norm, SMALLEST)
    along = tl.sum(g * unit, axis=1)[:, None]
    of_y = (g - tl.where(norm > SMALLEST, unit * along, 0.0)) / tl.maximum(norm, SMALLEST)
    target = out + ((tl.program_id(1).to(tl.int64) * tokens + tl.program_id(0)) * heads + row) * width + column
    tl.store(target, (of_y * sigmoid * (1 + values * (1 - sigmoid))).to(out.dtype.element_ty), mask=inside)


def _launch(kernel, tensors: tuple[Tensor, ...]) -> Tensor:
    tensors = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
    batch, tokens, heads, width = tensors[-1].shape
    out = torch.empty(tensors[-1].shape, dtype=tensors[-1].dtype, device=tensors[-1].device)
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    kernel[(tokens, batch, triton.cdiv(heads, _HEADS))](
        *tensors, out, tokens, heads, width, *strides,
        HEADS=min(_HEADS, triton.next_power_of_2(heads)), WIDTH=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return out


class UnitSiLU(torch.autograd.Function):
    """x [b, s, n, d] -> [b, s, n, d], contiguous. Keeps x alone."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _launch(_forward, (x,))

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return _launch(_backward, (grad, *ctx.saved_tensors))
