"""The token-mixing half of a layer: input projection, mixers, output projection. Stands as `self_attention` in TransformerLayer."""

import torch
from torch import Tensor

from hybrid_megatron import platform
from hybrid_megatron.config.schema import ModelConfig, ParallelConfig
from hybrid_megatron.model.linear import linears
from hybrid_megatron.model.mixers import MIXERS
from hybrid_megatron.model.pattern import Layer
from hybrid_megatron.model.unit_order import UnitOrder
from hybrid_megatron.ops.gradient_place import GradientOfSlices
from hybrid_megatron.ops.row_copy import copy_rows
from hybrid_megatron.parallel import SequenceLayout
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint, sharded_state_dict_default


class MixerLayer(MegatronModule):
    """One mixer for each head group of the layer, between projections whose rows and columns are stored in unit order (unit_order.py)."""

    def __init__(
        self,
        config: TransformerConfig,
        model: ModelConfig,
        parallel: ParallelConfig,
        layer: Layer,
        pg_collection: ProcessGroupCollection,
        **_from_transformer_layer,
    ):
        super().__init__(config=config)
        self.ranks = pg_collection
        self.order = UnitOrder(model, layer.groups)
        linear = linears(model.kernels.linear)
        shared = dict(config=config, init_method=config.init_method, bias=False, is_expert=False, tp_group=pg_collection.tp)
        if self.order.rows:
            self.in_proj = linear.input_projection(self.order, model.hidden_size, **shared)
        if self.order.shared:
            self.shared_proj = SharedProjection(config, model.hidden_size, self.order.shared, pg_collection)
        self.mixers = torch.nn.ModuleList(
            MIXERS[group.mixer](config, model, group, parallel, pg_collection, layer.number) for group in layer.groups
        )
        self.out_proj = linear.row(self.order.columns, model.hidden_size, input_is_parallel=True, skip_bias_add=True, **shared)

    def forward(self, hidden: Tensor, attention_mask=None, *, packed_seq_params: SequenceLayout, **_unused) -> tuple[Tensor, None]:
        """hidden [s, b, h] -> [s, b, h]; under sequence parallelism s is this tensor rank's share at both ends.

        TransformerBlock hands `packed_seq_params` from the model to every layer untouched; it carries the sequence layout.
        """
        parts = cut_batch_first(self.in_proj(hidden)[0], self.order) if self.order.rows else [{} for _ in self.mixers]
        if any(mixer.takes_input for mixer in self.mixers):
            x = self._whole_input(hidden).transpose(0, 1)
            parts = [part | {"x": x} if mixer.takes_input else part for mixer, part in zip(self.mixers, parts)]
        if self.order.shared:
            shared = self.order.cut_shared(self.shared_proj(hidden).transpose(0, 1))
            parts = [own | common for own, common in zip(parts, shared)]
        mixed = [mixer.mix(part, packed_seq_params) for mixer, part in zip(self.mixers, parts)]
        # Turned round before they are joined: what lies sequence first already is not copied, and several groups are once.
        return self.out_proj(self.order.join([o.transpose(0, 1) for o in mixed]).contiguous())

    def _whole_input(self, hidden: Tensor) -> Tensor:
        """hidden [s, b, h] with all tokens of this context rank; the backward pass sums what the tensor ranks' heads make of it."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self.ranks.tp)
        return copy_to_tensor_model_parallel_region(hidden, group=self.ranks.tp)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> ShardedStateDict:
        """Projections by megatron-core's own rule; the mixers' parameters split as they are marked."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own = {f"mixers.{name}": parameter for name, parameter in self.mixers.named_parameters()}
        if self.order.shared:
            own["shared_proj.weight"] = self.shared_proj.weight
        split = {name: 0 for name, parameter in own.items() if getattr(parameter, "tensor_model_parallel", False)}
        state = make_sharded_tensors_for_checkpoint(
            own, prefix, split, sharded_offsets, tp_group=self.ranks.tp, dp_cp_group=metadata["dp_cp_group"]
        )
        for name in ("in_proj", "out_proj") if self.order.rows else ("out_proj",):
            state |= sharded_state_dict_default(getattr(self, name), f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.ranks.tp)
        return state


def cut_batch_first(projected: Tensor, order: UnitOrder) -> list[dict[str, Tensor]]:
    """`order.cut` of projected [s, b, rows] as [b, s, rows]."""
    parts = iter(_Cut.apply(projected, order, GradientOfSlices.of(projected)))
    return [{name: next(parts) for name in names} for names in order.names]


class _Cut(torch.autograd.Function):
    """The gradients of all parts lie side by side as the projection has them: torch would join them batch first and turn them round."""

    @staticmethod
    def forward(ctx, projected: Tensor, order: UnitOrder, gradient: GradientOfSlices) -> tuple[Tensor, ...]:
        ctx.order, ctx.gradient = order, gradient
        return tuple(rows for part in order.cut(projected.transpose(0, 1)) for rows in part.values())

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        joined = ctx.gradient.take()
        places = [place for part in ctx.order.cut(joined.transpose(0, 1)) for place in part.values()]
        joined[..., sum(place.shape[-2:].numel() for place in places) :] = 0
        for place, gradient in zip(places, gradients):
            if gradient.data_ptr() != place.data_ptr():
                copy_rows(gradient, place)
        return joined, None, None


class SharedProjection(torch.nn.Module):
    """A narrow projection whose result all units need: every tensor rank holds it whole. It has no weight decay: it makes gates."""

    def __init__(self, config: TransformerConfig, hidden_size: int, rows: int, ranks: ProcessGroupCollection):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(rows, hidden_size, dtype=config.params_dtype, device=platform.device()))
        self.weight.sequence_parallel = config.sequence_parallel  # each tensor rank then has its tokens' part of the gradient
        self.weight.no_weight_decay = True
        self.sequence_parallel, self.ranks = config.sequence_parallel, ranks

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [s, b, h] (this tensor rank's share of s under sequence parallelism) -> [s, b, rows] of all tokens."""
        projected = torch.nn.functional.linear(hidden, self.weight)
        # Each rank's units use the whole result: the backward pass adds their gradients up.
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(projected, tensor_parallel_output_grad=True, group=self.ranks.tp)
        return copy_to_tensor_model_parallel_region(projected, group=self.ranks.tp)


def layer_reference(
    weights: dict[str, Tensor], hidden: Tensor, model: ModelConfig, layer: Layer, document_starts: Tensor | None = None
) -> Tensor:
    """What a MixerLayer computes, by its definition and for one process: hidden [b, s, h] -> [b, s, h], in the dtype given.

    `weights` holds the layer's parameters by their names, e.g. `in_proj.weight` and `mixers.0.A_log`.
    """
    order = UnitOrder(model, layer.groups)
    parts = order.cut(hidden @ order.in_block_order(weights["in_proj.weight"]).T) if order.rows else [{} for _ in layer.groups]
    parts = [part | {"x": hidden} if MIXERS[group.mixer].takes_input else part for group, part in zip(layer.groups, parts)]
    if order.shared:
        shared = order.cut_shared(hidden @ weights["shared_proj.weight"].T)
        parts = [own | common for own, common in zip(parts, shared)]
    mixed = []
    for i, (group, part) in enumerate(zip(layer.groups, parts)):
        inner = {name.removeprefix(f"mixers.{i}."): w for name, w in weights.items() if name.startswith(f"mixers.{i}.")}
        mixed.append(MIXERS[group.mixer].reference(part, inner, model, group, document_starts))
    return order.join(mixed) @ weights["out_proj.weight"].T
