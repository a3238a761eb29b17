"""The gradients of RMSNorm as a Triton kernel: input and gradient are read once, for the input's gradient and the weight's."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 1024  # at most: each has a sum of its own for the weight


@triton.jit
def _rms_norm_gradients(grad, more, x, weight, inverse, out, sums, rows, width, rows_each, MORE: tl.constexpr, BLOCK: tl.constexpr):
    """A program `rows_each` rows, one after the other; `inverse` is 1 / rms of each row, `more` added to the input's gradient."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * rows_each
    for row in range(first, tl.minimum(first + rows_each, rows)):
        at = row * width + column
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(inverse + row)
        normalised = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * r
        mean = tl.sum(g * w * normalised, axis=0) / width
        of_x = r * (g * w - normalised * mean)
        if MORE:
            of_x += tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, of_x.to(out.dtype.element_ty), mask=inside)
        total += g * normalised
    tl.store(sums + tl.program_id(0) * width + column, total, mask=inside)


def gradients(grad: Tensor, more: Tensor | None, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Of x [..., h] and weight [h], from that of the output; inverse [..., 1] float32 is 1 / rms. `more` is added to that of x."""
    grad, x, inverse, width = grad.contiguous(), x.contiguous(), inverse.contiguous(), x.shape[-1]
    rows = x.numel() // width
    rows_each = triton.cdiv(rows, _PROGRAMS)
    programs = triton.cdiv(rows, rows_each)
    out, sums = torch.empty_like(x), torch.empty(programs, width, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _rms_norm_gradients[(programs,)](
        grad, x if more is None else more.contiguous(), x, weight, inverse, out, sums, rows, width, rows_each,
        MORE=more is not None, BLOCK=block, num_warps=min(max(block // 256, 1), 16),
    )  # fmt: skip
    return out, sums.sum(0).to(weight.dtype)
