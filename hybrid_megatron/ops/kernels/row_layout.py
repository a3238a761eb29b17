"""Where the rows of heads x [b, s, n, d] lie in memory.

The projections compute [s, b, rows], so what is cut from them and what they take lies sequence first; FLA's kernels take and give what lies
batch first. A kernel that writes its result as the next one takes it saves a copy.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

_BORDER = 8  # elements: 16 bytes in bf16, the most that a thread moves at once


def lies_sequence_first(x: Tensor) -> bool:
    """Whether tokens of x [b, s, ...] lie further apart than samples."""
    return x.stride(1) > x.stride(0)


def empty_like(x: Tensor, *, sequence_first: bool) -> Tensor:
    """Of x's shape [b, s, ...], type and device, without gaps: in memory [s, b, ...] or [b, s, ...]."""
    batch, tokens, *rest = x.shape
    if sequence_first:
        return torch.empty(tokens, batch, *rest, dtype=x.dtype, device=x.device).transpose(0, 1)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def empty_for_gradient(x: Tensor, place: Callable[[], Tensor] | None) -> Tensor:
    """For the gradient of x: its place, if it has one (gradient_place.py), else without gaps in the order of x."""
    return empty_like(x, sequence_first=lies_sequence_first(x)) if place is None else place()


def dense_rows(x: Tensor) -> Tensor:
    """x [..., d] itself, or a copy where the elements of a row do not lie side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def steps_between_rows(*tensors: Tensor) -> tuple[int, list[int]]:
    """(step, strides of b, s and n of each tensor in steps): the step, in elements, is 8 or what of that divides all strides.

    A kernel that multiplies by the step, as a constant, knows that rows begin on borders and moves 16 bytes at once. Triton by itself
    looks at strides for multiples of 16 elements alone, and the projection's rows are a multiple of 8.
    """
    strides = [stride if length > 1 else 0 for x in tensors for stride, length in zip(x.stride()[:3], x.shape)]
    step = math.gcd(_BORDER, *strides)
    return step, [stride // step for stride in strides]
