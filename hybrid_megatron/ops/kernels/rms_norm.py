"""The gradients of RMSNorm as a Triton kernel: input and gradient are read once, for the input's gradient and the weight's."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 264  # at most, two for each multiprocessor of an H200: each has a sum of its own for the weight
_AT_ONCE = 4096  # elements of a program: while it computes these, the next two such blocks are on their way


@triton.jit
def _rms_norm_gradients(
    grad, more, x, weight, inverse, out, sums, rows, width, blocks_each,
    MORE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program `blocks_each` times ROWS rows, one after the other; `inverse` is 1 / rms of each row, `more` added to the input's
    gradient."""
    column = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    first = tl.program_id(0).to(tl.int64) * blocks_each * ROWS
    for block in tl.range(0, blocks_each, num_stages=STAGES):
        row = (first + block * ROWS + tl.arange(0, ROWS))[:, None]
        inside = (row < rows) & (column < width)
        at = row * width + column
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(inverse + row, mask=row < rows, other=0.0)
        normalised = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * r
        mean = tl.sum(g * w * normalised, axis=1)[:, None] / width
        of_x = r * (g * w - normalised * mean)
        if MORE:
            of_x += tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, of_x.to(out.dtype.element_ty), mask=inside)
        total += g * normalised
    channel = tl.arange(0, BLOCK)
    tl.store(sums + tl.program_id(0) * width + channel, tl.sum(total, axis=0), mask=channel < width)


def gradients(grad: Tensor, more: Tensor | None, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Of x [..., h] and weight [h], from that of the output; inverse [..., 1] float32 is 1 / rms. `more` is added to that of x."""
    grad, x, inverse, width = grad.contiguous(), x.contiguous(), inverse.contiguous(), x.shape[-1]
    rows, block = x.numel() // width, triton.next_power_of_2(width)
    at_once = max(_AT_ONCE // block, 1)
    blocks_each = triton.cdiv(triton.cdiv(rows, at_once), _PROGRAMS)
    programs = triton.cdiv(rows, blocks_each * at_once)
    out, sums = torch.empty_like(x), torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _rms_norm_gradients[(programs,)](
        grad, x if more is None else more.contiguous(), x, weight, inverse, out, sums, rows, width, blocks_each,
        MORE=more is not None, ROWS=at_once, BLOCK=block, STAGES=3 if block <= _AT_ONCE else 1,
        num_warps=min(max(at_once * block // 512, 1), 16),
    )  # fmt: skip
    return out, sums.sum(0).to(weight.dtype)
