"""Mixer `mamba2`: Mamba2 (Dao and Gu, 2024, arXiv 2405.21060) with a query and a key of each head, as in HypeNet (Chen et al., 2026, arXiv
2601.22156, appendix G.1).

q is Mamba2's C, k its B, v its x. With dt = softplus(W_dt x + dt_bias) and A = e^A_log of each head,

    S_t = e^{-A dt_t} S_{t-1} + k_t^T (dt_t v_t)        o_t = q_t S_t + D v_t

Departs from Mamba2's own layer: there all heads share B and C, the state is as wide as the recipe says, and a convolution with a bias and
SiLU stands before x, B and C in every model; here each head has its own of head_dim, and the convolution is an option that brings its SiLU
along (HypeNet has none). There the gate SiLU(z) multiplies before one RMSNorm over all channels; here the norm is of each head and the
gate comes behind it, as in the other linear mixers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.config.schema import Mamba2Config, ModelConfig
from hybrid_megatron.model.head_group import HeadGroup
from hybrid_megatron.model.mixers.decay_parameters import A_log_drawn_from, draw_dt_bias
from hybrid_megatron.model.mixers.linear import LinearMixer
from hybrid_megatron.ops.fused import fused
from hybrid_megatron.ops.scalar_decay import ScalarDecay


class Mamba2(LinearMixer):
    """Adds to LinearMixer's: row dt of each head, parameters A_log, dt_bias and D. Scale 1. Without position unless asked."""

    default_position = "nope"

    @staticmethod
    def settings(model: ModelConfig) -> Mamba2Config:
        return model.mamba2

    @staticmethod
    def scale(model: ModelConfig) -> float:
        return 1.0

    @staticmethod
    def gates(model: ModelConfig) -> dict[str, int]:
        return {"dt": 1}

    @staticmethod
    def gate_elements(model: ModelConfig) -> int:
        return 1

    @classmethod
    def kernel_bytes(cls, model: ModelConfig, element: int) -> int:
        """What D v is added to, and v before dt multiplies it where it is not the projected rows; of FLA's kernel in float32 the sums of
        gates. It computes the states again in the backward pass."""
        made = cls.settings(model).short_conv > 0 or cls.queries(model) > 1
        return element * model.head_dim * (2 if made else 1) + 4

    @staticmethod
    def transition_columns(model: ModelConfig) -> int:
        return 1

    @classmethod
    def inner_params(cls, model: ModelConfig, group: HeadGroup) -> int:
        return super().inner_params(model, group) + cls.float32_params(model, group)

    @classmethod
    def float32_params(cls, model: ModelConfig, group: HeadGroup) -> int:
        return 3 * group.heads

    @classmethod
    def inner_flops(cls, model: ModelConfig, group: HeadGroup, tokens: int, context: int) -> int:
        """D v and its sum too."""
        return super().inner_flops(model, group, tokens, context) + 2 * tokens * group.heads * model.head_dim

    def __init__(self, config, model, group, parallel, ranks, layer_number):
        super().__init__(config, model, group, parallel, ranks, layer_number)
        self.A_log = self._parameter(self.local_heads, A_log_drawn_from(1), per_unit=True, dtype=torch.float32)
        self.dt_bias = self._parameter(self.local_heads, draw_dt_bias, per_unit=True, dtype=torch.float32)
        self.D = self._parameter(self.local_heads, lambda shape, generator: torch.ones(shape), per_unit=True, dtype=torch.float32)

    def recurrence(self, q, k, v, parts) -> tuple[ScalarDecay, tuple[Tensor, ...]]:
        return ScalarDecay(), (q, k, *_stepped(v, parts["dt"].flatten(2), self.A_log, self.dt_bias))

    def _mixed(self, q, k, v, parts, layout) -> Tensor:
        return _with_skip(super()._mixed(q, k, v, parts, layout), v, self.D)

    @staticmethod
    def recur_by_definition(q, k, v, parts, weights, model, document_starts) -> Tensor:
        dt = torch.log1p((parts["dt"].flatten(2) + weights["dt_bias"]).exp())
        inputs = (q, k, dt[..., None] * v, -weights["A_log"].exp() * dt)
        return ScalarDecay().recurrent(inputs, scale=1.0, document_starts=document_starts)[0] + weights["D"][:, None] * v


@fused
def _stepped(v: Tensor, dt: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(dt v [b, s, n, d] in v's dtype, log gates [b, s, n] in float32 or wider) from v [b, s, n, d] and dt's rows [b, s, n]."""
    wide = torch.promote_types(v.dtype, torch.float32)
    step = F.softplus(dt.to(wide) + dt_bias)
    return (v.to(wide) * step[..., None]).to(v.dtype), -A_log.exp() * step


@fused
def _with_skip(o: Tensor, v: Tensor, D: Tensor) -> Tensor:
    """o + D v [b, s, n, d], D [n]."""
    wide = torch.promote_types(o.dtype, torch.float32)
    return (o.to(wide) + D[:, None] * v.to(wide)).to(o.dtype)
