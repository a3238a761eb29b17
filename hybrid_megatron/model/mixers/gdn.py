"""Mixer `gdn`: Gated DeltaNet (Yang et al., 2024, arXiv 2412.06464).

q, k and v pass through SiLU, as in the paper's layer, with its short convolution or without; q and k are then L2-normalised. Log gate
g = -e^A softplus(W_a x + dt) and beta = sigmoid(W_b x), twice that with `allow_neg_eigval`.
"""

import torch
from torch import Tensor

from hybrid_megatron.config.schema import GDNConfig, ModelConfig
from hybrid_megatron.model.head_group import HeadGroup
from hybrid_megatron.model.mixers.decay_parameters import A_log_drawn_from, draw_dt_bias
from hybrid_megatron.model.mixers.linear import LinearMixer
from hybrid_megatron.ops.gated_delta_gates import log_gate_and_beta
from hybrid_megatron.ops.gated_delta_kernels import kept_elements
from hybrid_megatron.ops.gated_delta_rule import GatedDeltaRule
from hybrid_megatron.ops.recurrence import KERNEL_CHUNK


class GDN(LinearMixer):
    """Adds to LinearMixer's: rows [a (decay), b (beta)] of each head, parameters A_log and dt_bias. Without position unless asked."""

    default_position = "nope"
    activates = unit_length = True
    widest_head = 256
    _state_products = 3  # k S too

    @staticmethod
    def settings(model: ModelConfig) -> GDNConfig:
        return model.gdn

    @staticmethod
    def gates(model: ModelConfig) -> dict[str, int]:
        return {"a": 1, "b": 1}

    @staticmethod
    def gate_elements(model: ModelConfig) -> int:
        return 2

    @staticmethod
    def kernel_bytes(model: ModelConfig, element: int) -> int:
        """The inverse of the chunk's triangular matrix, updates and states; in float32 beta and the sums of gates."""
        return element * (KERNEL_CHUNK + kept_elements(model.head_dim, model.head_dim)) + 4 * 2

    @classmethod
    def recomputed_bytes(cls, model: ModelConfig, group: HeadGroup, tokens: int, element: int) -> int:
        return tokens * group.heads * kept_elements(model.head_dim, model.head_dim) * element

    @staticmethod
    def transition_columns(model: ModelConfig) -> int:
        return model.head_dim

    @classmethod
    def inner_params(cls, model: ModelConfig, group: HeadGroup) -> int:
        return super().inner_params(model, group) + 2 * group.heads

    @classmethod
    def float32_params(cls, model: ModelConfig, group: HeadGroup) -> int:
        return 2 * group.heads

    def __init__(self, config, model, group, parallel, ranks, layer_number):
        super().__init__(config, model, group, parallel, ranks, layer_number)
        self.A_log = self._parameter(self.local_heads, A_log_drawn_from(0), per_unit=True, dtype=torch.float32)
        self.dt_bias = self._parameter(self.local_heads, draw_dt_bias, per_unit=True, dtype=torch.float32)
        self.keeps_states = config.recompute_granularity != "selective"

    def recurrence(self, q, k, v, parts) -> tuple[GatedDeltaRule, tuple[Tensor, ...]]:
        a, b = (parts[name].flatten(2) for name in ("a", "b"))
        g, beta = log_gate_and_beta(a, b, self.A_log, self.dt_bias, 2 if self.model.gdn.allow_neg_eigval else 1)
        return GatedDeltaRule(self.keeps_states), (q, k, v, g, beta)

    @staticmethod
    def recur_by_definition(q, k, v, parts, weights, model, document_starts) -> Tensor:
        q, k = (x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12) for x in (q, k))
        a, b = parts["a"].flatten(2), parts["b"].flatten(2)
        g = -weights["A_log"].exp() * torch.log1p((a + weights["dt_bias"]).exp())
        beta = (2 if model.gdn.allow_neg_eigval else 1) / (1 + (-b).exp())
        return GatedDeltaRule().recurrent((q, k, v, g, beta), scale=model.head_dim**-0.5, document_starts=document_starts)[0]
