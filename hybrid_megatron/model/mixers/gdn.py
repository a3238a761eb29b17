"""Mixer `gdn`: Gated DeltaNet (Yang et al., 2024, arXiv 2412.06464).

q, k and v pass through SiLU, as in the paper's layer; q and k are then L2-normalised. Log gate g = -e^A softplus(W_a x + dt) and
beta = sigmoid(W_b x), twice that with `allow_neg_eigval`. Each head's output passes through an RMSNorm whose weight all heads share,
times SiLU(W_z x). No short convolution. Gates, norms of q and k, states and the output's statistics are float32.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.config.schema import ModelConfig
from hybrid_megatron.model.mixers.base import Mixer
from hybrid_megatron.model.pattern import Layer
from hybrid_megatron.ops import gated_delta_rule as rule
from hybrid_megatron.ops.state_passing import recurrence_over_ranks
from hybrid_megatron.parallel import SequenceLayout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig


class GDN(Mixer):
    """A unit is one head: rows [q, k, v, z (output gate), a (decay), b (beta)]."""

    positions = (None,)
    needs_fla = True

    @staticmethod
    def units(model: ModelConfig) -> int:
        return model.num_heads

    @staticmethod
    def rows(model: ModelConfig) -> dict[str, int]:
        return {"q": model.head_dim, "k": model.head_dim, "v": model.head_dim, "z": model.head_dim, "a": 1, "b": 1}

    @staticmethod
    def columns(model: ModelConfig) -> int:
        return model.head_dim

    @staticmethod
    def inner_params(model: ModelConfig) -> int:
        """A_log and dt_bias a head, and one output norm."""
        return 2 * model.num_heads + model.head_dim

    @staticmethod
    def inner_flops(model: ModelConfig, tokens: int, context: int) -> int:
        """The recurrence as written: k S, the outer product k^T u, and q S, each a multiply-add per element of the state."""
        return 6 * tokens * model.num_heads * model.head_dim**2

    def __init__(self, config: TransformerConfig, model: ModelConfig, layer: Layer, groups: ProcessGroupCollection):
        super().__init__(config, model, layer, groups)
        self.A_log = self._parameter(self.local_units, _draw_A_log, per_unit=True, dtype=torch.float32)
        self.dt_bias = self._parameter(self.local_units, _draw_dt_bias, per_unit=True, dtype=torch.float32)
        self.out_norm = self._parameter(model.head_dim, lambda shape, generator: torch.ones(shape), per_unit=False)

    def mix(self, parts: dict[str, Tensor], layout: SequenceLayout) -> Tensor:
        q, k, v = (F.silu(parts[name]) for name in ("q", "k", "v"))
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k = (F.normalize(x.to(wide), dim=-1).to(x.dtype) for x in (q, k))
        g = -self.A_log.exp() * F.softplus(parts["a"][..., 0].to(wide) + self.dt_bias)
        beta = parts["b"][..., 0].to(wide).sigmoid() * (2 if self.model.gdn.allow_neg_eigval else 1)
        o = recurrence_over_ranks(rule.GatedDeltaRule(), (q, k, v, g, beta), self.model.head_dim**-0.5, layout, self.groups.cp)
        # One weight for heads on several tensor ranks: each rank has a part of its gradient, which this sums in the backward pass.
        weight = copy_to_tensor_model_parallel_region(self.out_norm, group=self.groups.tp)
        return F.rms_norm(o, weight.shape, weight, self.model.norm_eps) * F.silu(parts["z"])

    @staticmethod
    def reference(
        weights: dict[str, Tensor], hidden: Tensor, model: ModelConfig, layer: Layer, document_starts: Tensor | None = None
    ) -> Tensor:
        projected = (hidden @ weights["in_proj.weight"].T).unflatten(-1, (model.num_heads, -1))
        q, k, v, z, a, b = projected.split(list(GDN.rows(model).values()), -1)
        q, k, v = (x * torch.sigmoid(x) for x in (q, k, v))
        q, k = (x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12) for x in (q, k))
        g = -weights["mixer.A_log"].exp() * torch.log1p((a[..., 0] + weights["mixer.dt_bias"]).exp())
        beta = (2 if model.gdn.allow_neg_eigval else 1) / (1 + (-b[..., 0]).exp())
        o, _ = rule.recurrent(q, k, v, g, beta, scale=model.head_dim**-0.5, document_starts=document_starts)
        o = o / (o.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * weights["mixer.out_norm"]
        return (o * z * torch.sigmoid(z)).flatten(2) @ weights["out_proj.weight"].T


def _draw_A_log(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A = e^A_log uniform in (0, 16), as the paper's code draws it; the floor keeps the logarithm finite."""
    return (16 * torch.rand(shape, generator=generator)).clamp_min(1e-4).log()


def _draw_dt_bias(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """softplus(dt_bias) log-uniform in [1e-3, 1e-1]."""
    low, high = math.log(1e-3), math.log(1e-1)
    dt = (low + (high - low) * torch.rand(shape, generator=generator)).exp()
    return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus
