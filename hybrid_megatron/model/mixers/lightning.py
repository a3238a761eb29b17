"""Mixer `lightning`: linear attention with a fixed decay a head, as in HypeNet (Chen et al., 2026, arXiv 2601.22156, equations 18 and 19).

ln gamma_h = -2^(-8h/H) for h = 1 .. H, the layer's Lightning heads; RoPE, QK norm and a sigmoid gate unless the recipe says otherwise. The
output norm is a norm of each head, as equation 18 has it.
"""

from torch import Tensor

from hybrid_megatron import platform
from hybrid_megatron.config.schema import LightningConfig, ModelConfig
from hybrid_megatron.model.mixers.linear import LinearMixer
from hybrid_megatron.ops.fixed_decay import FixedDecay, lightning_log_decay


class Lightning(LinearMixer):
    """Adds nothing to LinearMixer's rows and parameters."""

    default_position = "rope"

    @staticmethod
    def settings(model: ModelConfig) -> LightningConfig:
        return model.lightning

    @staticmethod
    def gates(model: ModelConfig) -> dict[str, int]:
        return {}

    @staticmethod
    def gate_elements(model: ModelConfig) -> int:
        return 0

    @staticmethod
    def kernel_bytes(model: ModelConfig, element: int) -> int:
        return 0

    @staticmethod
    def transition_columns(model: ModelConfig) -> int:
        return 0  # known beforehand

    def __init__(self, config, model, group, parallel, ranks, layer_number):
        super().__init__(config, model, group, parallel, ranks, layer_number)
        first = ranks.tp.rank() * self.local_heads
        # On the device from the beginning: the host waits for a copy of memory that is not page-locked.
        self.log_decay = lightning_log_decay(group.heads)[first : first + self.local_heads].to(platform.device())

    def recurrence(self, q, k, v, parts) -> tuple[FixedDecay, tuple[Tensor, ...]]:
        return FixedDecay(self.log_decay), (q, k, v)

    @staticmethod
    def recur_by_definition(q, k, v, parts, weights, model, document_starts) -> Tensor:
        log_decay = lightning_log_decay(q.shape[2]).to(q.device, q.dtype)
        return FixedDecay(log_decay).recurrent((q, k, v), scale=model.head_dim**-0.5, document_starts=document_starts)[0]
