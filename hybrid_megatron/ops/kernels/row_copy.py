"""The copy of row_copy.py as a Triton kernel."""

import triton
import triton.language as tl
from torch import Tensor

from hybrid_megatron.ops.kernels.row_layout import dense_rows, steps_between_rows

_ROWS = 16  # of a program


@triton.jit
def _copy(
    source, target, rows, width, source_batch, source_token, source_row, target_batch, target_token, target_row,
    STEP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program a token and ROWS rows."""
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = (tl.program_id(2) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (column < width)
    values = tl.load(source + (batch * source_batch + token * source_token + row * source_row) * STEP + column, mask=inside)
    place = target + (batch * target_batch + token * target_token + row * target_row) * STEP + column
    tl.store(place, values.to(target.dtype.element_ty), mask=inside)


def copy(source: Tensor, target: Tensor) -> None:
    """source [b, s, n, d] into target [b, s, n, d], a view whose last dimension is dense."""
    assert source.shape == target.shape and (target.stride(-1) == 1 or target.shape[-1] == 1), f"{source.shape} into {target.shape}"
    source = dense_rows(source)
    batch, tokens, rows, width = target.shape
    block = min(triton.next_power_of_2(rows), _ROWS)
    step, strides = steps_between_rows(source, target)
    _copy[(tokens, batch, triton.cdiv(rows, block))](
        source, target, rows, width, *strides,
        STEP=step, ROWS=block, WIDTH=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
