"""Mixer `attention`: causal softmax attention over the whole context, with RoPE or without any position (NoPE)."""

import torch
from torch import Tensor

from hybrid_megatron.config.schema import ModelConfig
from hybrid_megatron.model.attention.causal import causal_attention
from hybrid_megatron.model.attention.rope import rotate
from hybrid_megatron.model.mixers.base import Mixer
from hybrid_megatron.model.pattern import Layer
from hybrid_megatron.parallel import SequenceLayout


class Attention(Mixer):
    """A unit is one key-value head with the query heads that share it: rows [q of each query head, k, v]."""

    positions = ("rope", "nope")

    @staticmethod
    def units(model: ModelConfig) -> int:
        return model.num_kv_heads or model.num_heads

    @staticmethod
    def rows(model: ModelConfig) -> dict[str, int]:
        queries = model.num_heads // Attention.units(model)
        return {"q": queries * model.head_dim, "k": model.head_dim, "v": model.head_dim}

    @staticmethod
    def columns(model: ModelConfig) -> int:
        return model.num_heads // Attention.units(model) * model.head_dim

    @staticmethod
    def inner_params(model: ModelConfig) -> int:
        return 0

    @staticmethod
    def inner_flops(model: ModelConfig, tokens: int, context: int) -> int:
        """q k^T and p v over the causal half: token t sees t + 1 keys, (context + 1) / 2 on average."""
        return 2 * tokens * model.num_heads * model.head_dim * (context + 1)

    @classmethod
    def check(cls, model: ModelConfig, layer: Layer, tensor: int) -> list[str]:
        if model.num_heads % cls.units(model):
            return [f"model.num_kv_heads={model.num_kv_heads}: it must divide model.num_heads={model.num_heads}"]
        return super().check(model, layer, tensor)

    def mix(self, parts: dict[str, Tensor], layout: SequenceLayout) -> Tensor:
        width = self.model.head_dim
        q = parts["q"].unflatten(-1, (-1, width)).flatten(2, 3)
        k, v = parts["k"], parts["v"]
        if self.layer.position == "rope":
            base = self.model.attention.rope_base
            q, k = rotate(q, layout, base), rotate(k, layout, base)
        o = causal_attention(q, k, v, layout, scale=width**-0.5, context_group=self.groups.cp)
        return o.unflatten(2, (self.local_units, -1)).flatten(3)

    @staticmethod
    def reference(
        weights: dict[str, Tensor], hidden: Tensor, model: ModelConfig, layer: Layer, document_starts: Tensor | None = None
    ) -> Tensor:
        batch, length, _ = hidden.shape
        units, width = Attention.units(model), model.head_dim
        q, k, v = (hidden @ weights["in_proj.weight"].T).unflatten(-1, (units, -1)).split(list(Attention.rows(model).values()), -1)
        q = q.unflatten(-1, (-1, width))  # [b, s, units, queries, d]
        position = torch.arange(length, device=hidden.device)
        if layer.position == "rope":
            half = torch.arange(0, width, 2, device=hidden.device, dtype=torch.float64) / width
            turn = torch.polar(torch.ones(length, width // 2, dtype=torch.float64), position[:, None] * model.attention.rope_base**-half)

            def rotated(x: Tensor) -> Tensor:
                """Complex multiplication of the pairs (i, i + d/2)."""
                pairs = torch.complex(x[..., : width // 2], x[..., width // 2 :])
                turned = pairs * turn.to(pairs.dtype).view(length, *(1,) * (x.dim() - 3), width // 2)
                return torch.cat((turned.real, turned.imag), -1)

            q, k = rotated(q), rotated(k)
        logits = torch.einsum("bsuqd,btud->buqst", q, k) * width**-0.5
        visible = position[:, None] >= position[None]
        if document_starts is not None:
            document = document_starts.long().cumsum(1)
            visible = visible & (document[:, :, None] == document[:, None, :])[:, None, None]
        p = logits.masked_fill(~visible, float("-inf")).softmax(-1)
        o = torch.einsum("buqst,btud->bsuqd", p, v)
        return o.flatten(2) @ weights["out_proj.weight"].T
