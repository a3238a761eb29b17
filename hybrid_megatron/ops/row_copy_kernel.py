"""The copy of row_copy.py as a Triton kernel."""

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16  # of a program


@triton.jit
def _copy(
    source, target, rows, width, source_batch, source_token, source_row, target_batch, target_token, target_row,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program a token and ROWS rows."""
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = (tl.program_id(2) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (column < width)
    values = tl.load(source + batch * source_batch + token * source_token + row * source_row + column, mask=inside)
    place = target + batch * target_batch + token * target_token + row * target_row + column
    tl.store(place, values.to(target.dtype.element_ty), mask=inside)


def copy(source: Tensor, target: Tensor) -> None:
    """source [b, s, n, d] into target [b, s, n, d], a view whose last dimension is dense."""
    assert source.shape == target.shape and (target.stride(-1) == 1 or target.shape[-1] == 1), f"{source.shape} into {target.shape}"
    source = source if source.stride(-1) == 1 or source.shape[-1] == 1 else source.contiguous()
    batch, tokens, rows, width = target.shape
    block = min(triton.next_power_of_2(rows), _ROWS)
    _copy[(tokens, batch, triton.cdiv(rows, block))](
        source, target, rows, width, *source.stride()[:3], *target.stride()[:3],
        ROWS=block, WIDTH=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
