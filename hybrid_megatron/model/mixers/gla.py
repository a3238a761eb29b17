"""Mixer `gla`: gated linear attention (Yang et al., 2023, arXiv 2312.06635, section 4).

Log forget gate of each channel of the key g = logsigmoid(W2 W1 x + b) / temperature, through a bottleneck W1 that all heads share.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.config.schema import GLAConfig, ModelConfig
from hybrid_megatron.model.head_group import HeadGroup
from hybrid_megatron.model.mixers.linear import LinearMixer
from hybrid_megatron.ops.fused import fused
from hybrid_megatron.ops.gated_linear_attention import GatedLinearAttention


class GLA(LinearMixer):
    """Adds to LinearMixer's: shared rows [w (W1 x)], parameters gate_up (W2) and gate_bias. Without position unless asked."""

    default_position = "nope"
    positions_within_documents = True  # the two channels that RoPE turns together have gates of their own

    @staticmethod
    def settings(model: ModelConfig) -> GLAConfig:
        return model.gla

    @staticmethod
    def gates(model: ModelConfig) -> dict[str, int]:
        return {}

    @classmethod
    def shared_rows(cls, model: ModelConfig, group: HeadGroup) -> dict[str, int]:
        return {"w": model.gla.gate_rank}

    @staticmethod
    def gate_elements(model: ModelConfig) -> int:
        return model.head_dim

    @staticmethod
    def kernel_bytes(model: ModelConfig, element: int) -> int:
        """What the bias is added to; in float32 the gates and FLA's scores within chunks of 64 tokens."""
        return element * model.head_dim + 4 * (model.head_dim + 64)

    @classmethod
    def gates_kept_as_sums(cls, model: ModelConfig) -> int:
        return model.head_dim

    @staticmethod
    def transition_columns(model: ModelConfig) -> int:
        return 1

    @classmethod
    def inner_params(cls, model: ModelConfig, group: HeadGroup) -> int:
        return super().inner_params(model, group) + group.heads * model.head_dim * (model.gla.gate_rank + 1)

    @classmethod
    def float32_params(cls, model: ModelConfig, group: HeadGroup) -> int:
        return group.heads * model.head_dim

    @classmethod
    def inner_flops(cls, model: ModelConfig, group: HeadGroup, tokens: int, context: int) -> int:
        return super().inner_flops(model, group, tokens, context) + 2 * tokens * group.heads * model.head_dim * model.gla.gate_rank

    def __init__(self, config, model, group, parallel, ranks, layer_number):
        super().__init__(config, model, group, parallel, ranks, layer_number)
        channels = self.local_heads * model.head_dim
        self.gate_up = self._parameter((channels, model.gla.gate_rank), per_unit=True)
        self.gate_bias = self._parameter(channels, lambda shape, generator: torch.zeros(shape), per_unit=True, dtype=torch.float32)

    def recurrence(self, q, k, v, parts) -> tuple[GatedLinearAttention, tuple[Tensor, ...]]:
        x = F.linear(parts["w"], self.gate_up)
        g = _log_gate(x, self.gate_bias, temperature=self.model.gla.gate_temperature)
        return GatedLinearAttention(), (q, k, v, g.unflatten(-1, (-1, self.model.head_dim)))

    @staticmethod
    def recur_by_definition(q, k, v, parts, weights, model, document_starts) -> Tensor:
        open_ = 1 / (1 + (-(parts["w"] @ weights["gate_up"].T + weights["gate_bias"])).exp())
        g = open_.log() / model.gla.gate_temperature
        inputs = (q, k, v, g.unflatten(-1, (-1, model.head_dim)))
        return GatedLinearAttention().recurrent(inputs, scale=model.head_dim**-0.5, document_starts=document_starts)[0]


@fused
def _log_gate(x: Tensor, bias: Tensor, *, temperature: float) -> Tensor:
    """In float32 or wider."""
    return F.logsigmoid(x.to(torch.promote_types(x.dtype, torch.float32)) + bias) / temperature
