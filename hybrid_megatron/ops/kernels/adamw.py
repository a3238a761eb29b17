"""AdamW's update of any number of tensors by one Triton kernel that reads each element once and writes it once, a copy in lower precision
with it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512  # 16 bytes a thread and tensor
_WARPS = 4
_COLUMNS = 6
"""Of the table: addresses of a tensor's values, gradient, two moments and copy (0 without one), and its elements."""


@triton.jit
def _adamw_update(
    table, tensors, blocks, lr, decay, beta1, beta2, rest1, rest2, eps, correction1, root2, divisor,
    COPY: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program a block: number `blocks[i]` of tensor `tensors[i]`. ALIGNED: addresses are multiples of 16 bytes, lengths of 4."""
    row = table + tl.load(tensors + tl.program_id(0)).to(tl.int64) * COLUMNS
    at = tl.load(blocks + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(row + 5)
    if ALIGNED:
        length = tl.multiple_of(length, 4)
    inside = at < length
    values = tl.load(row).to(tl.pointer_type(tl.float32)) + at
    gradients = tl.load(row + 1).to(tl.pointer_type(tl.float32)) + at
    firsts = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + at
    seconds = tl.load(row + 3).to(tl.pointer_type(tl.float32)) + at
    if ALIGNED:
        values, gradients = tl.multiple_of(values, [16]), tl.multiple_of(gradients, [16])
        firsts, seconds = tl.multiple_of(firsts, [16]), tl.multiple_of(seconds, [16])
    value, first, second = tl.load(values, mask=inside), tl.load(firsts, mask=inside), tl.load(seconds, mask=inside)
    gradient = tl.div_rn(tl.load(gradients, mask=inside), divisor)
    first = beta1 * first + rest1 * gradient
    second = beta2 * second + rest2 * gradient * gradient
    direction = tl.div_rn(tl.div_rn(first, correction1), tl.div_rn(tl.sqrt_rn(second), root2) + eps)
    value = value - decay * value - lr * direction
    tl.store(values, value, mask=inside)
    tl.store(firsts, first, mask=inside)
    tl.store(seconds, second, mask=inside)
    if COPY:
        address = tl.load(row + 4)
        copies = address.to(tl.pointer_type(tl.bfloat16)) + at
        if ALIGNED:
            copies = tl.multiple_of(copies, [16])
        tl.store(copies, value.to(tl.bfloat16), mask=inside & (address != 0))


@dataclass(frozen=True)
class _Launch:
    """Of tensors that are all aligned or all not: 16 bytes at a time, or an element."""

    table: Tensor
    tensors: Tensor
    blocks: Tensor
    copy: bool
    aligned: bool


class AdamWUpdate:
    """Of the same tensors, step after step: where they lie is written down once, and anew when one of them has moved."""

    def __init__(self):
        self._addresses: tuple | None = None
        self._launches: list[_Launch] = []

    def __call__(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Tensor],
        firsts: Sequence[Tensor],
        seconds: Sequence[Tensor],
        copies: Sequence[Tensor | None],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        step: int,
        divisor: float = 1.0,
    ) -> None:
        """Loshchilov and Hutter's algorithm 2, in place, from gradients divided by `divisor`, which stay as they are. All float32 and
        contiguous on one device; copies, in bfloat16, get the new values. `step` counts from 1."""
        columns = [[0 if x is None else x.data_ptr() for x in column] for column in (values, gradients, firsts, seconds, copies)]
        addresses = tuple(zip(*columns, [x.numel() for x in values], strict=True))
        if self._addresses != addresses:
            for dtype, given in ((torch.float32, (*values, *gradients, *firsts, *seconds)), (torch.bfloat16, copies)):
                assert all(x is None or (x.dtype == dtype and x.is_contiguous()) for x in given)
            self._addresses, self._launches = addresses, _launches(addresses, values[0].device)
        beta1, beta2 = betas
        for launch in self._launches:
            _adamw_update[(len(launch.tensors),)](
                launch.table, launch.tensors, launch.blocks, lr, lr * weight_decay, beta1, beta2, 1 - beta1, 1 - beta2, eps,
                1 - beta1**step, (1 - beta2**step) ** 0.5, divisor,
                COPY=launch.copy, ALIGNED=launch.aligned, COLUMNS=_COLUMNS, BLOCK=_BLOCK, num_warps=_WARPS,
            )  # fmt: skip


def _launches(addresses: tuple, device: torch.device) -> list[_Launch]:
    rows = torch.tensor(addresses, dtype=torch.int64)
    aligned = (rows[:, :5] % 16 == 0).all(1) & (rows[:, 5] % 4 == 0)
    launches = []
    for whether, table in ((True, rows[aligned]), (False, rows[~aligned])):
        counts = (table[:, 5] + _BLOCK - 1) // _BLOCK
        tensors = torch.repeat_interleave(torch.arange(len(table)), counts)
        blocks = torch.arange(len(tensors)) - (counts.cumsum(0) - counts)[tensors]
        if len(tensors):
            on_device = (x.to(device) for x in (table, tensors.int(), blocks.int()))
            launches.append(_Launch(*on_device, copy=bool(table[:, 4].any()), aligned=whether))
    return launches
