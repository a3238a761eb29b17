"""How decays by Mamba's parameters begin, g = -e^A_log softplus(x + dt_bias): what gdn, kda and mamba2 share."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def A_log_drawn_from(lowest: float) -> Callable[[tuple[int, ...], torch.Generator], Tensor]:
    """A = e^A_log uniform in (lowest, 16), as the papers' code draws it: from 0 (gdn) or 1 (kda, mamba2)."""

    def draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """The floor keeps the logarithm finite."""
        return (lowest + (16 - lowest) * torch.rand(shape, generator=generator)).clamp_min(1e-4).log()

    return draw


def draw_dt_bias(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """softplus(dt_bias) log-uniform in [1e-3, 1e-1]."""
    low, high = math.log(1e-3), math.log(1e-1)
    dt = (low + (high - low) * torch.rand(shape, generator=generator)).exp()
    return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus
