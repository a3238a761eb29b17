"""Rotation of pairs of channels (Su et al., 2021, arXiv 2104.09864, half-split) as one Triton kernel: read once, turned in float32, written
once. Torch's operators took eight passes, four of them in float32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 16  # of a program


@triton.jit
def _rotate(
    x, cos, sin, out, tokens, heads, half, stride_batch, stride_token, stride_head, table_batch,
    SIGN: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """A program a token and up to HEADS heads."""
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head = (tl.program_id(2) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (pair < half)
    angle = batch * table_batch + token * half + pair
    c = tl.load(cos + angle, mask=pair < half, other=0.0)
    s = tl.load(sin + angle, mask=pair < half, other=0.0) * SIGN
    source = x + batch * stride_batch + token * stride_token + head * stride_head + pair
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    target = out + ((batch * tokens + token) * heads + head) * (2 * half) + pair
    tl.store(target, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + half, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


def turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """x [b, s, n, d] by sign times the angles whose cos and sin [b or 1, s, d/2] float32 are given: a new, contiguous tensor."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, tokens, heads, width = x.shape
    assert cos.is_contiguous() and sin.is_contiguous() and cos.shape == (len(cos), tokens, width // 2)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotate[(tokens, batch, triton.cdiv(heads, _HEADS))](
        x, cos, sin, out, tokens, heads, width // 2, *x.stride()[:3], cos.stride(0) if len(cos) > 1 else 0,
        SIGN=sign, HEADS=min(_HEADS, triton.next_power_of_2(heads)), HALF=triton.next_power_of_2(width // 2), num_warps=4,
    )  # fmt: skip
    return out


class Rotate(torch.autograd.Function):
    """x [b, s, n, d], cos and sin [b or 1, s, d/2] -> [b, s, n, d]. The gradient turns back."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return turned(grad, *ctx.saved_tensors, -1), None, None
