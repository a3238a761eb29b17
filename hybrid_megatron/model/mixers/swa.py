"""Mixer `swa`: sliding-window attention, RoPE inside the window."""

from torch import Tensor

from hybrid_megatron.config.schema import ModelConfig, ParallelConfig, SWAConfig
from hybrid_megatron.model.attention.windowed import windowed_attention
from hybrid_megatron.model.head_group import HeadGroup
from hybrid_megatron.model.mixers.softmax import SoftmaxMixer
from hybrid_megatron.parallel import SequenceLayout
from hybrid_megatron.parallel.halo import busiest_halo


class SWA(SoftmaxMixer):
    """Token t sees tokens t - window + 1 to t. See softmax.py for its units, options and parameters."""

    default_position = "rope"

    @staticmethod
    def settings(model: ModelConfig) -> SWAConfig:
        return model.swa

    @staticmethod
    def sight(model: ModelConfig, group: HeadGroup) -> int:
        return model.swa.window

    @classmethod
    def check(cls, model: ModelConfig, group: HeadGroup, parallel: ParallelConfig, context: int) -> list[str]:
        problems = super().check(model, group, parallel, context)
        if model.swa.window > context:
            problems.append(
                f"model.swa.window={model.swa.window}: it must not be wider than train.context={context}; lower it, or use mixer attention"
            )
        return problems

    @classmethod
    def context_bytes(cls, model: ModelConfig, group: HeadGroup, context: int, parallel: ParallelConfig, element: int) -> int:
        """The keys and values of the window's halo."""
        keys = 2 * cls.units(model, group) // parallel.tensor * model.head_dim * element
        return keys * busiest_halo(model.swa.window - 1, context, parallel.context)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout) -> Tensor:
        return windowed_attention(q, k, v, layout, self.model.swa.window, self.model.head_dim**-0.5, self.ranks.cp)
