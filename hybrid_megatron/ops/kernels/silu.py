"""The row-wise SiLU of silu.py, with or without the L2 norm, as Triton kernels: each row is read once, computed in float32, and written
once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_megatron.ops.gradient_place import place_of_gradient
from hybrid_megatron.ops.kernels.row_layout import dense_rows, empty_for_gradient, empty_like, steps_between_rows

_HEADS = 4  # of a program
SMALLEST: tl.constexpr = tl.constexpr(1e-12)
"""A norm below it counts as this, as in torch.nn.functional.normalize."""


@triton.jit
def _places(
    heads, width, batch_stride, token_stride, head_stride, STEP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Where this program's rows lie [HEADS, WIDTH], and which of these places there are; a program a token and HEADS heads."""
    row = (tl.program_id(2) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    return (batch * batch_stride + token * token_stride + row * head_stride) * STEP + column, (row < heads) & (column < width)


@triton.jit
def _silu(
    x, out, heads, width, x_batch, x_token, x_head, out_batch, out_token, out_head,
    UNIT: tl.constexpr, STEP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """UNIT: and then the L2 norm of each row."""
    source, inside = _places(heads, width, x_batch, x_token, x_head, STEP, HEADS, WIDTH)
    values = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
    y = values * tl.sigmoid(values)
    if UNIT:
        y = y / tl.maximum(tl.sqrt(tl.sum(y * y, axis=1)), SMALLEST)[:, None]
    target, inside = _places(heads, width, out_batch, out_token, out_head, STEP, HEADS, WIDTH)
    tl.store(out + target, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_gradient(
    grad, x, out, heads, width, grad_batch, grad_token, grad_head, x_batch, x_token, x_head, out_batch, out_token, out_head,
    UNIT: tl.constexpr, STEP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    source, inside = _places(heads, width, grad_batch, grad_token, grad_head, STEP, HEADS, WIDTH)
    of_y = tl.load(grad + source, mask=inside, other=0.0).to(tl.float32)
    source, inside = _places(heads, width, x_batch, x_token, x_head, STEP, HEADS, WIDTH)
    values = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(values)
    if UNIT:
        y = values * sigmoid
        norm = tl.sqrt(tl.sum(y * y, axis=1))[:, None]
        unit = y / tl.maximum(norm, SMALLEST)
        along = tl.sum(of_y * unit, axis=1)[:, None]
        of_y = (of_y - tl.where(norm > SMALLEST, unit * along, 0.0)) / tl.maximum(norm, SMALLEST)
    target, inside = _places(heads, width, out_batch, out_token, out_head, STEP, HEADS, WIDTH)
    tl.store(out + target, (of_y * sigmoid * (1 + values * (1 - sigmoid))).to(out.dtype.element_ty), mask=inside)


def _launch(kernel, inputs: tuple[Tensor, ...], out: Tensor, unit: bool) -> Tensor:
    tensors = (*(dense_rows(x) for x in inputs), out)
    batch, tokens, heads, width = out.shape
    step, strides = steps_between_rows(*tensors)
    kernel[(tokens, batch, triton.cdiv(heads, _HEADS))](
        *tensors, heads, width, *strides,
        UNIT=unit, STEP=step, HEADS=min(_HEADS, triton.next_power_of_2(heads)), WIDTH=triton.next_power_of_2(width), num_warps=2,
    )  # fmt: skip
    return out


class SiLU(torch.autograd.Function):
    """x [b, s, n, d] -> [b, s, n, d], contiguous; the gradient lies as x does. `unit`: and then the L2 norm. Keeps x alone."""

    @staticmethod
    def forward(ctx, x: Tensor, unit: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.unit, ctx.place = unit, place_of_gradient(x)
        return _launch(_silu, (x,), empty_like(x, sequence_first=False), unit)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return _launch(_silu_gradient, (grad, x), empty_for_gradient(x, ctx.place), ctx.unit), None
