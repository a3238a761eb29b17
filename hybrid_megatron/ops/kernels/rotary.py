"""Rotation of pairs of channels (Su et al., 2021, arXiv 2104.09864, half-split) as one Triton kernel: read once, turned in float32, written
once. Torch's operators took eight passes, four of them in float32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_megatron.ops.gradient_place import place_of_gradient
from hybrid_megatron.ops.kernels.row_layout import dense_rows, empty_like, lies_sequence_first, steps_between_rows

_HEADS = 16  # of a program


@triton.jit
def _rotate(
    x, cos, sin, out, heads, half, table_batch, x_batch, x_token, x_head, out_batch, out_token, out_head,
    SIGN: tl.constexpr, STEP: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """A program a token and up to HEADS heads."""
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head = (tl.program_id(2) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (pair < half)
    angle = batch * table_batch + token * half + pair
    c = tl.load(cos + angle, mask=pair < half, other=0.0)
    s = tl.load(sin + angle, mask=pair < half, other=0.0) * SIGN
    source = x + (batch * x_batch + token * x_token + head * x_head) * STEP + pair
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    target = out + (batch * out_batch + token * out_token + head * out_head) * STEP + pair
    tl.store(target, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + half, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


def turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int, out: Tensor) -> Tensor:
    """x [b, s, n, d] by sign times the angles whose cos and sin [b or 1, s, d/2] float32 are given, written to out."""
    x = dense_rows(x)
    batch, tokens, heads, width = x.shape
    assert cos.is_contiguous() and sin.is_contiguous() and cos.shape == (len(cos), tokens, width // 2)
    step, strides = steps_between_rows(x, out)
    _rotate[(tokens, batch, triton.cdiv(heads, _HEADS))](
        x, cos, sin, out, heads, width // 2, cos.stride(0) if len(cos) > 1 else 0, *strides,
        SIGN=sign, STEP=step, HEADS=min(_HEADS, triton.next_power_of_2(heads)), HALF=triton.next_power_of_2(width // 2), num_warps=4,
    )  # fmt: skip
    return out


class Rotate(torch.autograd.Function):
    """x [b, s, n, d], cos and sin [b or 1, s, d/2] -> [b, s, n, d], in memory as x lies, or batch first if so asked. The gradient turns
    back, and lies as x does."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, batch_first: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.place = place_of_gradient(x)
        ctx.sequence_first = lies_sequence_first(x)
        return turn(x, cos, sin, 1, empty_like(x, sequence_first=ctx.sequence_first and not batch_first))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        out = empty_like(grad, sequence_first=ctx.sequence_first) if ctx.place is None else ctx.place()
        return turn(grad, *ctx.saved_tensors, -1, out), None, None, None
