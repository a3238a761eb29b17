"""The activation of the feed-forward blocks, as megatron-core's MLP takes a module for it."""

import torch
from torch import Tensor

from hybrid_megatron.ops.swiglu import swiglu
from megatron.core.transformer.transformer_config import TransformerConfig


class SwiGLU(torch.nn.Module):
    """[..., 2 f], gate before up, -> [..., f]."""

    def __init__(self, config: TransformerConfig):
        super().__init__()

    def forward(self, gate_and_up: Tensor) -> Tensor:
        return swiglu(gate_and_up)
