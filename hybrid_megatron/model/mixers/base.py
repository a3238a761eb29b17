"""The contract of a token mixer.

A mixer works on *units*: the smallest group of heads that tensor parallelism may not cut (one key-value head with the query heads that
share it). `MixerLayer` owns the two projections; model/unit_order.py says how their rows and columns are ordered. Only a mixer whose
projections see different inputs has its own (`takes_input`) and no rows there. What a layer's heads compute stands in a HeadGroup:
layer-wise hybrids have one group a layer, head-wise ones several, and a mixer cannot tell the difference.

What a mixer says about itself without being built (`num_params`, `flops`, `check`, ...) is read by planning, accounting and validation;
they read nothing else. Each mixer also has a plain `reference` of what it does between the projections, run in float64 by tests.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from hybrid_megatron import platform
from hybrid_megatron.config.schema import ModelConfig, ParallelConfig
from hybrid_megatron.model.head_group import HeadGroup
from hybrid_megatron.parallel import SequenceLayout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

STATE_BYTES = 4
"""Of one element of a recurrent state: float32."""
CACHE_BYTES = 2
"""Of one element of cached keys and values."""


class Mixer(MegatronModule):
    """Mixes tokens within the heads of a group's units that this tensor rank holds."""

    default_position: str | None = None
    """What `position` is where a recipe says none; None: it must say."""
    needs_fla: bool = False
    """Whether it computes with flash-linear-attention's kernels on CUDA."""
    takes_input: bool = False
    """Whether its parts hold `x` [b, s, h], the layer's input, all tokens of this context rank; it then projects that itself."""

    def __init__(
        self,
        config: TransformerConfig,
        model: ModelConfig,
        group: HeadGroup,
        parallel: ParallelConfig,
        ranks: ProcessGroupCollection,
        layer_number: int,
    ):
        """`layer_number`: of its layer in the model, from 1."""
        super().__init__(config=config)
        self.model, self.group, self.parallel, self.ranks = model, group, parallel, ranks
        self.local_units = self.units(model, group) // ranks.tp.size()
        self.local_heads = group.heads // ranks.tp.size()

    # --- what is known without building it -------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def units(cls, model: ModelConfig, group: HeadGroup) -> int:
        """Units of the group, over all tensor ranks."""

    @classmethod
    @abstractmethod
    def rows(cls, model: ModelConfig, group: HeadGroup) -> dict[str, int]:
        """Named rows of the input projection for one unit, in order."""

    @classmethod
    def shared_rows(cls, model: ModelConfig, group: HeadGroup) -> dict[str, int]:
        """Named rows of a second projection of the layer's input, the same for all units and held whole by every tensor rank."""
        return {}

    @classmethod
    @abstractmethod
    def columns(cls, model: ModelConfig, group: HeadGroup) -> int:
        """Columns of the output projection for one unit."""

    @classmethod
    @abstractmethod
    def inner_params(cls, model: ModelConfig, group: HeadGroup) -> int:
        """Parameters of the group beside the projections."""

    @classmethod
    def whole_params(cls, model: ModelConfig, group: HeadGroup) -> int:
        """Those of `inner_params` that every tensor rank holds whole; the others are split with the units."""
        return 0

    @classmethod
    def float32_params(cls, model: ModelConfig, group: HeadGroup) -> int:
        """Those of `inner_params` that are float32 in every precision; they are split with the units."""
        return 0

    @classmethod
    @abstractmethod
    def inner_flops(cls, model: ModelConfig, group: HeadGroup, tokens: int, context: int) -> int:
        """Forward FLOPs of the group beside the projections, for `tokens` tokens in samples of `context`. One multiply-add is two."""

    @classmethod
    @abstractmethod
    def state_bytes(cls, model: ModelConfig, group: HeadGroup, context: int) -> int:
        """What a sample of `context` tokens leaves for the tokens after it: recurrent states, a window's or all keys and values."""

    @classmethod
    @abstractmethod
    def activation_bytes(cls, model: ModelConfig, group: HeadGroup, tokens: int, element: int) -> int:
        """What the group keeps for the backward pass, its projected rows included, for `tokens` tokens of samples that are whole on one
        rank, with the kernels used on CUDA; `element` bytes an activation. The projections' own inputs are not in it."""

    @classmethod
    def whole_activation_bytes(cls, model: ModelConfig, group: HeadGroup, tokens: int, element: int) -> int:
        """Those of `activation_bytes` that every tensor rank keeps whole: shared rows."""
        return tokens * sum(cls.shared_rows(model, group).values()) * element

    @classmethod
    def recomputed_bytes(cls, model: ModelConfig, group: HeadGroup, tokens: int, element: int) -> int:
        """Those of `activation_bytes` that train.recompute=selective computes again."""
        return 0

    @classmethod
    def keeps_its_output(cls, model: ModelConfig) -> bool:
        """Whether what it hands to the output projection is among `activation_bytes`, where one rank has the whole sample."""
        return False

    @classmethod
    @abstractmethod
    def context_bytes(cls, model: ModelConfig, group: HeadGroup, context: int, parallel: ParallelConfig, element: int) -> int:
        """What one context rank receives from others in the forward pass, for one sample of `context` tokens; `element` bytes an
        activation. The busiest rank's figure."""

    @classmethod
    def context_backward_bytes(cls, model: ModelConfig, group: HeadGroup, context: int, parallel: ParallelConfig, element: int) -> int:
        """What it receives in the backward pass at most: as much, unless the mixer says less."""
        return cls.context_bytes(model, group, context, parallel, element)

    @classmethod
    def context_kept_bytes(cls, model: ModelConfig, group: HeadGroup, context: int, parallel: ParallelConfig, element: int) -> int:
        """What one context rank keeps for the backward pass beyond its share of `activation_bytes`, for one sample of `context` tokens:
        what it received from others, unless the mixer says more."""
        return cls.context_bytes(model, group, context, parallel, element)

    @classmethod
    def pieces_kept_bytes(cls, model: ModelConfig, group: HeadGroup, samples: int, context: int, tensor: int) -> int:
        """What a rank that has whole samples keeps beyond its share of `activation_bytes` where it takes them in pieces side by side, for
        `samples` of `context` tokens over `tensor` ranks."""
        return 0

    @classmethod
    def num_params(cls, model: ModelConfig, group: HeadGroup) -> int:
        """Parameters of the group: its part of the projections, and inner ones."""
        return cls._projected(model, group) * model.hidden_size + cls.inner_params(model, group)

    @classmethod
    def flops(cls, model: ModelConfig, group: HeadGroup, tokens: int, context: int) -> int:
        """Forward FLOPs of the group: projections and mixing."""
        return 2 * tokens * cls._projected(model, group) * model.hidden_size + cls.inner_flops(model, group, tokens, context)

    @classmethod
    def _projected(cls, model: ModelConfig, group: HeadGroup) -> int:
        unit = sum(cls.rows(model, group).values()) + cls.columns(model, group)
        return cls.units(model, group) * unit + sum(cls.shared_rows(model, group).values())

    @classmethod
    def check(cls, model: ModelConfig, group: HeadGroup, parallel: ParallelConfig, context: int) -> list[str]:
        """One sentence for each thing that the recipe asks of this group and it cannot do. Tensor sizes are checked by layer."""
        if group.position == "rope" and model.head_dim % 2:
            return [f"model.head_dim={model.head_dim}: RoPE turns pairs of channels, so it must be even"]
        return []

    # --- the computation ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def mix(self, parts: dict[str, Tensor], layout: SequenceLayout) -> Tensor:
        """From the projected rows of the local units, `parts[name]` [b, s, units, size], and shared rows [b, s, size], to
        [b, s, units, columns]. The gradient of the input `x` is this tensor rank's part; the layer sums it."""

    @classmethod
    @abstractmethod
    def reference(
        cls, parts: dict[str, Tensor], weights: dict[str, Tensor], model: ModelConfig, group: HeadGroup, document_starts: Tensor | None
    ) -> Tensor:
        """What `mix` computes, by its definition and for one process: parts [b, s, units, size] or [b, s, size] -> [b, s, units, columns].

        `weights` holds the group's inner parameters by their names, e.g. `A_log`.
        """

    # --- for subclasses ------------------------------------------------------------------------------------------------------------

    def _parameter(
        self, shape: int | tuple[int, ...], init=None, *, per_unit: bool, decayed: bool = False, dtype: torch.dtype | None = None
    ) -> torch.nn.Parameter:
        """A parameter split over tensor ranks with the units along its first dimension, or the same on all of them.

        `init(shape, generator)` draws it whole; without it, model/initialize.py draws it like any other. Gates, decays and norms have no
        weight decay (`decayed=False`).
        """
        dtype = dtype or self.config.params_dtype
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=platform.device()))
        parameter.init = init
        parameter.no_weight_decay = not decayed
        if per_unit:
            parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1
        return parameter

    def _norm_weight(self) -> torch.nn.Parameter:
        """The weight [head_dim] of a norm of each head, shared by all heads of the group."""
        return self._parameter(self.model.head_dim, per_unit=False)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last dimension, statistics in float32."""
        return torch.nn.functional.rms_norm(x, weight.shape, self._for_all_heads(weight), self.model.norm_eps)

    def _for_all_heads(self, weight: Tensor) -> Tensor:
        """One weight for heads on several tensor ranks: each rank has a part of its gradient, which this sums in the backward pass."""
        return copy_to_tensor_model_parallel_region(weight, group=self.ranks.tp)


def all_to_all_problems(key: str, who: str, heads: int, parallel: ParallelConfig, other: str) -> list[str]:
    """What stands against cutting `heads` heads over tensor and then context ranks."""
    if heads % (parallel.tensor * parallel.context) == 0:
        return []
    return [
        f"parallel.{key}=all_to_all: {who} has {heads} key-value heads, which parallel.tensor * parallel.context = {parallel.tensor} * "
        f"{parallel.context} must divide; use parallel.{key}={other}, which has no such limit, or other sizes"
    ]
