"""What Triton kernels share whose programs take the rows of one head of x [b, s, n, d], some tokens at a time: parameters of the head's
channels are read once by a program, and the sums for their gradients stay in registers.

Heads follow each other in the grid, so what programs read at one time lies side by side.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_megatron.ops.kernels.row_layout import steps_between_rows

_ELEMENTS = 1024  # of a program at once
_ELEMENTS_BACKWARD = 512  # where sums take registers too
_PROGRAMS = 2048  # about as many in a backward pass: each has sums of its own for the parameters


@triton.jit
def place(heads):
    """(block of tokens, head, sample) of this program."""
    block = tl.program_id(0) // heads
    return block, tl.program_id(0) - block * heads, tl.program_id(1).to(tl.int64)


@triton.jit
def load(x, steps, batch, token, head, column, inside, STEP: tl.constexpr):
    """Rows of x in float32, zeros outside; `steps` are its distances between samples, tokens and heads."""
    at = (batch * steps[0] + token.to(tl.int64) * steps[1] + head * steps[2]) * STEP + column
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store(x, values, steps, batch, token, head, column, inside, STEP: tl.constexpr):
    at = (batch * steps[0] + token.to(tl.int64) * steps[1] + head * steps[2]) * STEP + column
    tl.store(x + at, values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def parameter(x, head, column, width):
    """The head's part [1, WIDTH] of x [n * width], in float32."""
    return tl.load(x + head * width + column, mask=column < width, other=0.0).to(tl.float32)


@triton.jit
def store_sum(sums, rows, which: tl.constexpr, COUNT: tl.constexpr, width, WIDTH: tl.constexpr):
    """The sum of rows [ROWS, WIDTH] as number `which` of the COUNT that this program has in sums [programs, COUNT, width]."""
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    column = tl.arange(0, WIDTH)
    tl.store(sums + (program * COUNT + which) * width + column, tl.sum(rows, axis=0), mask=column < width)


def steps_of(*tensors: Tensor) -> tuple[int, list[tuple[int, ...]]]:
    """(step, each tensor's distances between samples, tokens and heads in steps): see row_layout.py."""
    step, steps = steps_between_rows(*tensors)
    return step, [tuple(steps[first : first + 3]) for first in range(0, len(steps), 3)]


def grid(x: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """(grid, constants) of programs that each take ROWS tokens of a head of x [b, s, n, d]."""
    batch, tokens, heads, width = x.shape
    constants = _constants(width, _ELEMENTS)
    return (triton.cdiv(tokens, constants["ROWS"]) * heads, batch), constants


def grid_with_sums(x: Tensor, count: int) -> tuple[tuple[int, int], dict[str, int], int, Tensor]:
    """(grid, constants, tokens of each program, a multiple of ROWS, and what its `count` sums are written to)."""
    batch, tokens, heads, width = x.shape
    constants = _constants(width, _ELEMENTS_BACKWARD)
    tokens_each = triton.cdiv(triton.cdiv(batch * tokens * heads, _PROGRAMS), constants["ROWS"]) * constants["ROWS"]
    blocks = triton.cdiv(tokens, tokens_each)
    sums = torch.empty(batch * blocks, heads, count, width, dtype=torch.float32, device=x.device)
    return (blocks * heads, batch), constants, tokens_each, sums


def _constants(width: int, elements: int) -> dict[str, int]:
    padded = triton.next_power_of_2(width)
    return dict(ROWS=max(elements // padded, 1), WIDTH=padded, num_warps=4)


def summed(sums: Tensor) -> list[Tensor]:
    """Those of all programs: `count` times [n * d]."""
    return [channels.flatten() for channels in sums.sum(0).unbind(1)]
