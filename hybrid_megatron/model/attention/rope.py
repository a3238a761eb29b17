"""Rotary position embedding (Su et al., 2021, arXiv 2104.09864), Llama's half-split form."""

from functools import lru_cache

import torch
from torch import Tensor

from hybrid_megatron.parallel import SequenceLayout


def rotate(x: Tensor, layout: SequenceLayout, base: float, *, within_documents: bool = False, batch_first: bool = False) -> Tensor:
    """Rotate x [b, s, n, d] by its global positions: pair (i, i + d/2) turns by position * base^(-2i/d). Computed in float32 or wider.

    `within_documents`: where documents are masked, positions count from the start of each. In attention only distances matter, and it is
    the same; not so where the channels of a pair decay apart. On CUDA the result lies in memory as x does, sequence first where x is cut
    from a projection, and attention gives its output that order; with `batch_first` it lies as FLA's kernels take it.
    """
    work = torch.promote_types(x.dtype, torch.float32)
    table = (x.shape[-1], base, work, str(x.device))
    if within_documents and layout.document_starts is not None:
        cos, sin = layout.once(("rope", *table), lambda: _table_in_documents(layout, table))
    else:
        cos, sin = _table(SequenceLayout(layout.context, layout.size, layout.rank), *table)
    if x.is_cuda and work is torch.float32:
        from hybrid_megatron.ops.kernels.rotary import Rotate

        return Rotate.apply(x, *(turns.view(-1, x.shape[1], x.shape[-1] // 2) for turns in (cos, sin)), batch_first)
    first, second = x.to(work).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


@lru_cache(maxsize=32)
def _table(layout: SequenceLayout, dim: int, base: float, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """cos and sin [s, 1, d/2]; angles in float64, since a position times a frequency loses digits in float32."""
    frequencies = base ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim)
    angles = (layout.positions(device).double()[:, None] * frequencies)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _table_in_documents(layout: SequenceLayout, table: tuple) -> tuple[Tensor, ...]:
    positions = layout.local(_positions_in_documents(layout.document_starts))
    return tuple(whole[positions] for whole in _table(SequenceLayout(layout.context), *table))


def _positions_in_documents(starts: Tensor) -> Tensor:
    """[b, s] tokens since the start of the document, from the sample's start before the first."""
    position = torch.arange(starts.shape[1], device=starts.device).expand(starts.shape)
    return position - (position * starts).cummax(dim=1).values
