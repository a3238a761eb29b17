"""Mixer `kda`: Kimi Delta Attention (Kimi Team, 2025, arXiv 2510.26692), as the layer of flash-linear-attention has it.

q, k and v pass through SiLU, with the short convolution or without; q and k are then L2-normalised. Log forget gate of each channel of the
key g = -e^A softplus(W2 W1 x + dt) with a number A a head and dt a channel, beta = sigmoid(W_b x), twice that with `allow_neg_eigval`, and
the output gate sigmoid(W4 W3 x + c). The bottlenecks W1 and W3 are head_dim wide and all heads share them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.config.schema import KDAConfig, ModelConfig
from hybrid_megatron.model.head_group import HeadGroup
from hybrid_megatron.model.mixers.decay_parameters import A_log_drawn_from, draw_dt_bias
from hybrid_megatron.model.mixers.linear import LinearMixer
from hybrid_megatron.ops.fused import fused
from hybrid_megatron.ops.kimi_delta_rule import KimiDeltaRule
from hybrid_megatron.ops.recurrence import KERNEL_CHUNK


class KDA(LinearMixer):
    """Has the output gate among the shared rows: [f (W1 x), z (W3 x)], and of each head row b (beta). Adds parameters gate_up (W2), A_log,
    dt_bias and, with an output gate, z_up (W4) and z_bias (c). Without position unless asked."""

    default_position = "nope"
    activates = unit_length = True
    widest_head = 256
    positions_within_documents = True  # the two channels that RoPE turns together have gates of their own
    _state_products = 3  # k S too

    @staticmethod
    def settings(model: ModelConfig) -> KDAConfig:
        return model.kda

    @classmethod
    def rows(cls, model: ModelConfig, group: HeadGroup) -> dict[str, int]:
        return {name: size for name, size in super().rows(model, group).items() if name != "z"}

    @classmethod
    def shared_rows(cls, model: ModelConfig, group: HeadGroup) -> dict[str, int]:
        return {"f": model.head_dim} | ({"z": model.head_dim} if _has_gate(model) else {})

    @staticmethod
    def gates(model: ModelConfig) -> dict[str, int]:
        return {"b": 1}

    @staticmethod
    def gate_elements(model: ModelConfig) -> int:
        return model.head_dim + 1

    @staticmethod
    def kernel_bytes(model: ModelConfig, element: int) -> int:
        """What dt_bias is added to and what the output gate is made of. Of FLA's kernel: the scores of q and the inverse of the triangular
        matrix of each chunk; in float32 the gates, their sums, and beta. w, u, v_new and the states between chunks are computed again in
        the backward pass."""
        width = model.head_dim
        return element * (width + (width if _has_gate(model) else 0) + 2 * KERNEL_CHUNK) + 4 * (2 * width + 1)

    @staticmethod
    def transition_columns(model: ModelConfig) -> int:
        return model.head_dim

    @classmethod
    def inner_params(cls, model: ModelConfig, group: HeadGroup) -> int:
        channels = group.heads * model.head_dim
        gate = channels * (model.head_dim + 1) if _has_gate(model) else 0
        return super().inner_params(model, group) + channels * model.head_dim + cls.float32_params(model, group) + gate

    @classmethod
    def float32_params(cls, model: ModelConfig, group: HeadGroup) -> int:
        return group.heads * (model.head_dim + 1)

    @classmethod
    def inner_flops(cls, model: ModelConfig, group: HeadGroup, tokens: int, context: int) -> int:
        ups = 2 if _has_gate(model) else 1
        return super().inner_flops(model, group, tokens, context) + 2 * tokens * ups * group.heads * model.head_dim**2

    def __init__(self, config, model, group, parallel, ranks, layer_number):
        super().__init__(config, model, group, parallel, ranks, layer_number)
        channels = self.local_heads * model.head_dim
        self.gate_up = self._parameter((channels, model.head_dim), per_unit=True)
        self.A_log = self._parameter(self.local_heads, A_log_drawn_from(1), per_unit=True, dtype=torch.float32)
        self.dt_bias = self._parameter(channels, draw_dt_bias, per_unit=True, dtype=torch.float32)
        if _has_gate(model):
            self.z_up = self._parameter((channels, model.head_dim), per_unit=True)
            self.z_bias = self._parameter(channels, lambda shape, generator: torch.zeros(shape), per_unit=True)

    def recurrence(self, q, k, v, parts) -> tuple[KimiDeltaRule, tuple[Tensor, ...]]:
        f = F.linear(parts["f"], self.gate_up).unflatten(-1, (-1, self.model.head_dim))
        largest_beta = 2 if self.model.kda.allow_neg_eigval else 1
        gates = _gates(f, parts["b"].flatten(2), self.A_log, self.dt_bias, largest_beta=largest_beta)
        return KimiDeltaRule(), (q, k, v, *gates)

    def _gate_rows(self, parts: dict[str, Tensor]) -> Tensor:
        return F.linear(parts["z"], self.z_up, self.z_bias).unflatten(-1, (self.local_units, -1))

    @classmethod
    def gate_rows_by_definition(cls, parts: dict[str, Tensor], weights: dict[str, Tensor], model: ModelConfig) -> Tensor:
        return (parts["z"] @ weights["z_up"].T + weights["z_bias"]).unflatten(-1, (-1, cls.queries(model) * model.head_dim))

    @staticmethod
    def recur_by_definition(q, k, v, parts, weights, model, document_starts) -> Tensor:
        q, k = (x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12) for x in (q, k))
        f = (parts["f"] @ weights["gate_up"].T + weights["dt_bias"]).unflatten(-1, (-1, model.head_dim))
        g = -weights["A_log"].exp()[:, None] * torch.log1p(f.exp())
        beta = (2 if model.kda.allow_neg_eigval else 1) / (1 + (-parts["b"].flatten(2)).exp())
        return KimiDeltaRule().recurrent((q, k, v, g, beta), scale=model.head_dim**-0.5, document_starts=document_starts)[0]


def _has_gate(model: ModelConfig) -> bool:
    return model.kda.output_gate != "none"


@fused
def _gates(f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, largest_beta: int) -> tuple[Tensor, Tensor]:
    """g [b, s, n, d] and beta [b, s, n], in float32 or wider; f [b, s, n, d], b [b, s, n], A_log [n], dt_bias [n d]."""
    wide = torch.promote_types(f.dtype, torch.float32)
    g = -A_log.exp()[:, None] * F.softplus(f.to(wide) + dt_bias.view(-1, f.shape[-1]))
    return g, largest_beta * b.to(wide).sigmoid()
