"""Rotary position embedding (Su et al., 2021, arXiv 2104.09864), Llama's half-split form."""

from functools import lru_cache

import torch
from torch import Tensor

from hybrid_megatron.parallel import SequenceLayout


def rotate(x: Tensor, layout: SequenceLayout, base: float) -> Tensor:
    """Rotate x [b, s, n, d] by its global positions: pair (i, i + d/2) turns by position * base^(-2i/d). Computed in float32 or wider."""
    work = torch.promote_types(x.dtype, torch.float32)
    cos, sin = _table(layout.context, layout.size, layout.rank, x.shape[-1], base, work, str(x.device))
    first, second = x.to(work).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


@lru_cache(maxsize=32)
def _table(context: int, size: int, rank: int, dim: int, base: float, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """cos and sin [s, 1, d/2]; angles in float64, since a position times a frequency loses digits in float32."""
    positions = SequenceLayout(context, size, rank).positions(device).double()
    frequencies = base ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim)
    angles = (positions[:, None] * frequencies)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)
