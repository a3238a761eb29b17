"""Mixer `attention`: causal softmax attention over the whole context, with RoPE or without any position (NoPE)."""

from torch import Tensor

from hybrid_megatron.config.schema import AttentionConfig, ModelConfig, ParallelConfig
from hybrid_megatron.model.attention.causal import causal_attention
from hybrid_megatron.model.attention.logit_scale import scale_queries
from hybrid_megatron.model.attention.windowed import windowed_attention
from hybrid_megatron.model.head_group import HeadGroup
from hybrid_megatron.model.mixers.base import all_to_all_problems
from hybrid_megatron.model.mixers.softmax import SoftmaxMixer
from hybrid_megatron.parallel import SequenceLayout
from hybrid_megatron.parallel.halo import busiest_halo


class Attention(SoftmaxMixer):
    """See softmax.py for its units, options and parameters."""

    @staticmethod
    def settings(model: ModelConfig) -> AttentionConfig:
        return model.attention

    @staticmethod
    def sight(model: ModelConfig, group: HeadGroup) -> int | None:
        return group.inference.window

    @classmethod
    def check(cls, model: ModelConfig, group: HeadGroup, parallel: ParallelConfig, context: int) -> list[str]:
        problems = super().check(model, group, parallel, context)
        if problems or parallel.context == 1 or parallel.context_attention != "all_to_all":
            return problems
        return all_to_all_problems("context_attention", str(group), cls.units(model, group), parallel, "gather")

    @classmethod
    def context_bytes(cls, model: ModelConfig, group: HeadGroup, context: int, parallel: ParallelConfig, element: int) -> int:
        """All others' keys and values, or q, k, v and o changed from sequence to heads and back."""
        size, local = parallel.context, context // parallel.context
        keys = 2 * cls.units(model, group) // parallel.tensor * model.head_dim * element
        if cls.sight(model, group) is not None:
            return keys * busiest_halo(cls.sight(model, group) - 1, context, size)
        if parallel.context_attention == "gather":
            return (size - 1) * local * keys
        queries = 2 * group.heads // parallel.tensor * model.head_dim * element
        return local * (keys + queries) * (size - 1) // size

    @classmethod
    def context_kept_bytes(cls, model: ModelConfig, group: HeadGroup, context: int, parallel: ParallelConfig, element: int) -> int:
        """Keys and values of all tokens, or q, k and v of all tokens of a share of the heads, less what these copies replace: k (and q) as
        the kernel would take them, and the projected rows, where nothing else holds them. It may be below zero."""
        if parallel.context == 1:
            return 0
        local, width = context // parallel.context, model.head_dim * element
        queries, keys = group.heads // parallel.tensor * width, 2 * cls.units(model, group) // parallel.tensor * width
        settings, by_heads = cls.settings(model), parallel.context_attention == "all_to_all"
        kept = local * (queries + keys) if by_heads else context * keys
        if settings.qk_norm or group.position == "rope":
            kept -= local * (keys // 2 + (queries if by_heads else 0))
        q_lies_in_them = not by_heads and group.position != "rope"
        held = q_lies_in_them or settings.qk_norm or settings.output_gate != "none" or group.heads < model.num_heads
        return kept if held else kept - local * (queries + keys)

    def rope_base(self, layout: SequenceLayout) -> float:
        """Dynamic NTK: base (L / L0)^(d / (d - 2)) on an input of L tokens, L0 in training, L > L0."""
        base, inference = super().rope_base(layout), self.group.inference
        if not inference.dynamic_ntk or layout.context <= inference.trained_context:
            return base
        width = self.model.head_dim
        return base * (layout.context / inference.trained_context) ** (width / (width - 2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout) -> Tensor:
        inference, scale = self.group.inference, self.model.head_dim**-0.5
        q = scale_queries(q, layout, inference)
        if inference.window is not None:
            return windowed_attention(q, k, v, layout, inference.window, scale, self.ranks.cp)
        how = {"exchange": self.parallel.context_attention, "backend": self.model.attention.backend}
        return causal_attention(q, k, v, layout, scale, self.ranks.cp, **how)
