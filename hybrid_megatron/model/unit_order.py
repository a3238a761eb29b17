"""The order of the rows of a layer's input projection and of the columns of its output projection.

A *unit* of a head group is the smallest set of its heads that tensor parallelism may not cut: one key-value head with the query heads that
share it. A layer's units are as many as divide every group's units: each layer unit holds as many units of each group, one group after the
other. Rows and columns run layer unit by layer unit, so that any tensor size dividing the layer's units is a contiguous split, one matrix
product serves all groups, and a checkpoint moves between tensor sizes without being rearranged. (776m at 3:1 over 12 heads: 9 linear heads
and 3 attention heads in 3 layer units of 3 and 1.)
"""

import math

import torch
from torch import Tensor

from hybrid_megatron.config.schema import ModelConfig
from hybrid_megatron.model.head_group import HeadGroup
from hybrid_megatron.model.mixers import MIXERS


class UnitOrder:
    """Sizes of a layer's units, and the cutting and joining of what runs in their order."""

    def __init__(self, model: ModelConfig, groups: tuple[HeadGroup, ...]):
        self._model, self._groups = model, groups
        counts = [MIXERS[group.mixer].units(model, group) for group in groups]
        self.units = math.gcd(*counts)
        """Layer units, over all tensor ranks."""
        self._inside = [count // self.units for count in counts]  # units of each group in a layer unit
        self._rows = [MIXERS[group.mixer].rows(model, group) for group in groups]
        self._columns = [MIXERS[group.mixer].columns(model, group) for group in groups]
        self.shared_rows = [MIXERS[group.mixer].shared_rows(model, group) for group in groups]
        """By group: named rows of the projection that all units share."""

    @property
    def rows(self) -> int:
        """Of the input projection, over all units."""
        return self.units * sum(inside * sum(rows.values()) for inside, rows in zip(self._inside, self._rows))

    @property
    def columns(self) -> int:
        """Of the output projection, over all units."""
        return self.units * sum(inside * columns for inside, columns in zip(self._inside, self._columns))

    @property
    def shared(self) -> int:
        """Rows of the shared projection; 0 where no group has any."""
        return sum(sum(rows.values()) for rows in self.shared_rows)

    def copied_rows(self, element: int) -> int:
        """Rows that `cut` copies while they stay in the projection too, over all units; `element` bytes each. Copied are those of a group
        with several units in a layer unit, which lie in pieces; the projection stays if another group keeps its rows where they are."""
        aligned = sum(inside * sum(rows.values()) for inside, rows in zip(self._inside, self._rows)) * element % 16 == 0
        stays = any(
            inside == 1 and MIXERS[group.mixer].keeps_rows(self._model, group, aligned) for inside, group in zip(self._inside, self._groups)
        )
        copied = sum(inside * sum(rows.values()) for inside, rows in zip(self._inside, self._rows) if inside > 1)
        return self.units * copied if stays and len(self._inside) > 1 else 0

    def possible_tensor_sizes(self) -> list[int]:
        return [size for size in range(1, self.units + 1) if self.units % size == 0]

    def cut(self, projected: Tensor) -> list[dict[str, Tensor]]:
        """[..., rows of some whole layer units] -> for each group its named rows, each [..., units of the group, size]."""
        return [{name: rows.flatten(-3, -2) for name, rows in part.items()} for part in self.places(projected)]

    def places(self, projected: Tensor) -> list[dict[str, Tensor]]:
        """As `cut`, but views: each [..., layer units, units of the group in one, size]."""
        widths = [inside * sum(rows.values()) for inside, rows in zip(self._inside, self._rows)]
        parts = projected.unflatten(-1, (-1, sum(widths))).split(widths, dim=-1)
        return [
            dict(zip(rows, part.unflatten(-1, (inside, sum(rows.values()))).split(list(rows.values()), dim=-1)))
            for part, inside, rows in zip(parts, self._inside, self._rows)
        ]

    def cut_shared(self, projected: Tensor) -> list[dict[str, Tensor]]:
        """[..., shared rows] -> for each group its named shared rows, each [..., size]."""
        sizes = [sum(rows.values()) for rows in self.shared_rows]
        return [dict(zip(rows, part.split(list(rows.values()), -1))) for part, rows in zip(projected.split(sizes, -1), self.shared_rows)]

    def join(self, mixed: list[Tensor]) -> Tensor:
        """For each group [..., units of the group, columns] -> [..., columns of all these units], in the order of the output projection."""
        if len(mixed) == 1:
            return mixed[0].flatten(-2)
        by_unit = [o.unflatten(-2, (-1, inside)).flatten(-2) for o, inside in zip(mixed, self._inside)]
        return torch.cat(by_unit, dim=-1).flatten(-2)
