"""RMSNorm (Zhang and Sennrich, 2019, arXiv 1910.07467) of the residual stream, by what computes it (`model.kernels.norm`)."""

from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_megatron import platform
from hybrid_megatron.ops.rms_norm import rms_norm, rms_norm_and_input
from megatron.core.transformer.transformer_config import TransformerConfig

NORM = ("triton", "te")


class Norms(NamedTuple):
    final: type
    residual: type
    """At the head of a residual branch."""


def norms(backend: str) -> Norms:
    """A CPU has torch's alone."""
    if backend == "te" and platform.is_cuda():
        from hybrid_megatron.model import transformer_engine as te  # only where it is installed

        return Norms(te.RMSNorm, te.ResidualRMSNorm)
    return Norms(RMSNorm, ResidualRMSNorm)


class RMSNorm(torch.nn.Module):
    """Over the last dimension, statistics in float32, result in the input's dtype.

    megatron-core's own torch norm refuses sequence parallelism and does not mark its weight for the gradient sum over tensor ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype, device=platform.device()))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class ResidualRMSNorm(RMSNorm):
    """At the head of a residual branch: the normalised input, and the input itself for the branch's end, as TransformerLayer takes them."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm_and_input(x, self.weight, self.eps)
