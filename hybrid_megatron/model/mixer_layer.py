"""The token-mixing half of a layer: input projection, mixer, output projection. Stands as `self_attention` in TransformerLayer."""

from torch import Tensor

from hybrid_megatron.config.schema import ModelConfig
from hybrid_megatron.model.mixers import MIXERS
from hybrid_megatron.model.pattern import Layer
from hybrid_megatron.parallel import SequenceLayout
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint, sharded_state_dict_default


class MixerLayer(MegatronModule):
    """Rows of `in_proj` and columns of `out_proj` are ordered unit by unit (see mixers/base.py)."""

    def __init__(
        self, config: TransformerConfig, model: ModelConfig, layer: Layer, pg_collection: ProcessGroupCollection, **_from_transformer_layer
    ):
        super().__init__(config=config)
        kind = MIXERS[layer.mixer]
        self.rows = kind.rows(model)
        units = kind.units(model)
        shared = dict(config=config, init_method=config.init_method, bias=False, is_expert=False, tp_group=pg_collection.tp)
        self.in_proj = ColumnParallelLinear(
            model.hidden_size, units * sum(self.rows.values()), gather_output=False, skip_bias_add=False, **shared
        )
        self.mixer = kind(config, model, layer, pg_collection)
        self.out_proj = RowParallelLinear(
            units * kind.columns(model), model.hidden_size, input_is_parallel=True, skip_bias_add=True, **shared
        )
        self.groups = pg_collection

    def forward(self, hidden: Tensor, attention_mask=None, *, packed_seq_params: SequenceLayout, **_unused) -> tuple[Tensor, None]:
        """hidden [s, b, h] -> [s, b, h]; under sequence parallelism s is this tensor rank's share at both ends.

        TransformerBlock hands `packed_seq_params` from the model to every layer untouched; it carries the sequence layout.
        """
        projected, _ = self.in_proj(hidden)
        by_unit = projected.transpose(0, 1).unflatten(-1, (self.mixer.local_units, -1))  # [b, s, units, rows]
        parts = dict(zip(self.rows, by_unit.split(list(self.rows.values()), dim=-1)))
        mixed = self.mixer.mix(parts, packed_seq_params)
        return self.out_proj(mixed.flatten(2).transpose(0, 1).contiguous())

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> ShardedStateDict:
        """Projections by megatron-core's own rule; the mixer's parameters split as they are marked."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own = dict(self.mixer.named_parameters())
        split = {name: 0 for name, parameter in own.items() if getattr(parameter, "tensor_model_parallel", False)}
        state = make_sharded_tensors_for_checkpoint(
            own, f"{prefix}mixer.", split, sharded_offsets, tp_group=self.groups.tp, dp_cp_group=metadata["dp_cp_group"]
        )
        for name in ("in_proj", "out_proj"):
            state |= sharded_state_dict_default(getattr(self, name), f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.groups.tp)
        return state
