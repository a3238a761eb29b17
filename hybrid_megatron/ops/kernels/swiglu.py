"""SiLU(gate) * up and its gradient as Triton kernels, computed in float32: each element is read once and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _swiglu(x, out, width, BLOCK: tl.constexpr):
    """A program a token and BLOCK channels; x has gate and up side by side, `width` each."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_gradient(grad, x, out, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    of_gate = g * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(out + row * 2 * width + column, of_gate.to(out.dtype.element_ty), mask=inside)
    tl.store(out + row * 2 * width + width + column, (g * gate * sigmoid).to(out.dtype.element_ty), mask=inside)


def product(x: Tensor) -> Tensor:
    """x [..., 2 f] -> [..., f]."""
    x, width = x.contiguous(), x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], width)
    _swiglu[(out.numel() // width, triton.cdiv(width, _BLOCK))](x, out, width, BLOCK=_BLOCK, num_warps=4)
    return out


def gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Of x [..., 2 f], from that of the product [..., f]."""
    grad, x, width = grad.contiguous(), x.contiguous(), grad.shape[-1]
    out = torch.empty_like(x)
    _swiglu_gradient[(grad.numel() // width, triton.cdiv(width, _BLOCK))](grad, x, out, width, BLOCK=_BLOCK, num_warps=4)
    return out
