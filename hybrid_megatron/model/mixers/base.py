"""The contract of a token mixer.

A mixer works on *units*: the smallest group of heads that tensor parallelism may not cut (one key-value head with its queries, or one
linear head). `MixerLayer` owns the two projections; their rows and columns are ordered unit by unit, so any tensor size that divides the
number of units is a contiguous split, and a checkpoint moves between tensor sizes without being rearranged.

What a mixer says about itself without being built (`num_params`, `flops`, `check`, ...) is read by planning, accounting and validation;
they read nothing else. Each mixer also has a plain `reference` of its whole layer, run in float64 by tests.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from hybrid_megatron import platform
from hybrid_megatron.config.schema import ModelConfig
from hybrid_megatron.model.pattern import Layer
from hybrid_megatron.parallel import SequenceLayout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class Mixer(MegatronModule):
    """Mixes tokens within the heads of the units that this tensor rank holds."""

    positions: tuple[str | None, ...]
    """What `position` may be in a recipe's pattern."""
    needs_fla: bool = False
    """Whether it computes with flash-linear-attention's kernels on CUDA."""

    def __init__(self, config: TransformerConfig, model: ModelConfig, layer: Layer, groups: ProcessGroupCollection):
        super().__init__(config=config)
        self.model, self.layer, self.groups = model, layer, groups
        self.local_units = self.units(model) // groups.tp.size()

    # --- what is known without building it -------------------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def units(model: ModelConfig) -> int:
        """Units of a layer, over all tensor ranks."""

    @staticmethod
    @abstractmethod
    def rows(model: ModelConfig) -> dict[str, int]:
        """Named rows of the input projection for one unit, in order."""

    @staticmethod
    @abstractmethod
    def columns(model: ModelConfig) -> int:
        """Columns of the output projection for one unit."""

    @staticmethod
    @abstractmethod
    def inner_params(model: ModelConfig) -> int:
        """Parameters of a layer beside the two projections."""

    @staticmethod
    @abstractmethod
    def inner_flops(model: ModelConfig, tokens: int, context: int) -> int:
        """Forward FLOPs of a layer beside the projections, for `tokens` tokens in samples of `context`. One multiply-add is two."""

    @classmethod
    def num_params(cls, model: ModelConfig) -> int:
        """Parameters of a layer: projections and inner ones."""
        width = sum(cls.rows(model).values()) + cls.columns(model)
        return cls.units(model) * width * model.hidden_size + cls.inner_params(model)

    @classmethod
    def flops(cls, model: ModelConfig, tokens: int, context: int) -> int:
        """Forward FLOPs of a layer: projections and mixing."""
        width = sum(cls.rows(model).values()) + cls.columns(model)
        return 2 * tokens * cls.units(model) * width * model.hidden_size + cls.inner_flops(model, tokens, context)

    @classmethod
    def check(cls, model: ModelConfig, layer: Layer, tensor: int) -> list[str]:
        """One sentence for each thing that the recipe asks of this mixer and it cannot do."""
        problems = []
        if layer.position not in cls.positions:
            allowed = " or ".join("none (leave it out)" if p is None else p for p in cls.positions)
            problems.append(f"pattern: mixer {layer.mixer} has position={layer.position}; it must be {allowed}")
        units = cls.units(model)
        if units % tensor:
            sizes = ", ".join(str(size) for size in range(1, units + 1) if units % size == 0)
            problems.append(
                f"parallel.tensor={tensor}: mixer {layer.mixer} has {units} heads that can be split, and tensor must divide them; "
                f"use one of {sizes}"
            )
        return problems

    # --- the computation ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def mix(self, parts: dict[str, Tensor], layout: SequenceLayout) -> Tensor:
        """From the projected rows of the local units, `parts[name]` [b, s, units, rows], to [b, s, units, columns]."""

    @staticmethod
    @abstractmethod
    def reference(
        weights: dict[str, Tensor], hidden: Tensor, model: ModelConfig, layer: Layer, document_starts: Tensor | None = None
    ) -> Tensor:
        """The whole layer by its definition, for one process: hidden [b, s, h] -> [b, s, h], in the dtype given.

        `weights` holds the layer's parameters by their names in the model, e.g. `in_proj.weight` and `mixer.A_log`.
        """

    # --- for subclasses ------------------------------------------------------------------------------------------------------------

    def _parameter(self, size: int, init, *, per_unit: bool, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        """A vector parameter: split over tensor ranks with the units, or the same on all of them.

        `init(shape, generator)` draws it whole. It has no weight decay, being a vector (megatron-core's rule).
        """
        dtype = dtype or self.config.params_dtype
        parameter = torch.nn.Parameter(torch.empty(size, dtype=dtype, device=platform.device()))
        parameter.init = init
        if per_unit:
            parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1
        return parameter
