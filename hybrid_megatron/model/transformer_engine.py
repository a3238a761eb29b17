"""Transformer Engine's linear layers and RMSNorm in the places of ours: the same parameters and the same checkpoints.

megatron-core's own wrappers ask global process groups, which a run here does not have, and put states of FP8 into checkpoints.
"""

import torch
import transformer_engine.pytorch as te
from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_megatron import platform
from hybrid_megatron.model.unit_order import UnitOrder
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class _Linear(te.Linear):
    """Built and called as megatron-core's parallel linear layers, which have no biases here."""

    split: int
    """The dimension of the weight that tensor ranks share."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, tp_group: ProcessGroup, **_of_megatron):
        super().__init__(
            input_size,
            output_size,
            bias=False,
            sequence_parallel=config.sequence_parallel,
            tp_group=tp_group,
            parallel_mode=("column", "row")[self.split],
            params_dtype=config.params_dtype,
            init_method=_leave_to_initialize,
            device=platform.device(),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None

    @property
    def gradient_accumulation_fusion(self) -> bool:
        """megatron-core's word for it (training/weight_gradients.py)."""
        return self.fuse_wgrad_accumulation

    @gradient_accumulation_fusion.setter
    def gradient_accumulation_fusion(self, on: bool) -> None:
        self.fuse_wgrad_accumulation = on

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> ShardedStateDict:
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"weight": self.split}, sharded_offsets, tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"]
        )

    def get_extra_state(self) -> None:
        """Without FP8 there is none; megatron-core's linear layers have an empty one too."""

    def set_extra_state(self, state) -> None:
        """Nothing to set."""


class Column(_Linear):
    split = 0


class Row(_Linear):
    split = 1


class InputProjection(Column):
    """As model/linear.py's: stored in unit order, multiplying in block order."""

    rearranges_weight = True

    def __init__(self, order: UnitOrder, hidden_size: int, **shared):
        super().__init__(hidden_size, order.rows, **shared)
        self.order = order

    def _get_weight_tensors(self) -> list[Tensor]:
        """What te.Linear multiplies by."""
        return [self.order.in_block_order(self.weight)]


class RMSNorm(te.RMSNorm):
    """As model/norm.py's."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__(
            hidden_size, eps=eps, dtype=config.params_dtype, device=platform.device(), sequence_parallel=config.sequence_parallel
        )

    # Checkpoints have the weight alone, as ours.
    get_extra_state = torch.nn.Module.get_extra_state
    set_extra_state = torch.nn.Module.set_extra_state


class ResidualRMSNorm(RMSNorm):
    """At the head of a residual branch, as model/norm.py's."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x


def _leave_to_initialize(weight: Tensor) -> None:
    """model/initialize.py draws every parameter."""
