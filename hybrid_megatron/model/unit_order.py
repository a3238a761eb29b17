"""The order of the rows of a layer's input projection and of the columns of its output projection.

A *unit* of a head group is the smallest set of its heads that tensor parallelism may not cut: one key-value head with the query heads that
share it. A layer's units are as many as divide every group's units: each layer unit holds as many units of each group, one group after the
other. Rows and columns run layer unit by layer unit, so that any tensor size dividing the layer's units is a contiguous split, one matrix
product serves all groups, and a checkpoint moves between tensor sizes without being rearranged. (776m at 3:1 over 12 heads: 9 linear heads
and 3 attention heads in 3 layer units of 3 and 1.)

The input projection computes its rows in *block order* instead: the q of all units of a group side by side, then their k, and so on, and
last what is narrow (a gate of one row a head). Every block then begins on a border of 16 bytes, which kernels need to reach the memory's
speed, and cuDNN's attention to be right.
"""

import math
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from hybrid_megatron.config.schema import ModelConfig
from hybrid_megatron.model.head_group import HeadGroup
from hybrid_megatron.model.mixers import MIXERS

BORDER = 8
"""Elements: 16 bytes in bf16."""


class UnitOrder:
    """Sizes of a layer's units, and the cutting and joining of what runs in their order."""

    def __init__(self, model: ModelConfig, groups: tuple[HeadGroup, ...]):
        self._model, self._groups = model, groups
        counts = [MIXERS[group.mixer].units(model, group) for group in groups]
        self.units = math.gcd(*counts)
        """Layer units, over all tensor ranks."""
        self._inside = [count // self.units for count in counts]  # units of each group in a layer unit
        self._rows = [MIXERS[group.mixer].rows(model, group) for group in groups]
        self._orders: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        self._columns = [MIXERS[group.mixer].columns(model, group) for group in groups]
        self.shared_rows = [MIXERS[group.mixer].shared_rows(model, group) for group in groups]
        """By group: named rows of the projection that all units share."""

    @property
    def names(self) -> list[list[str]]:
        """Of each group's rows, in the order in which `cut` gives them."""
        return [list(rows) for rows in self._rows]

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

    def computed_rows(self, tensor: int) -> int:
        """Of one of `tensor` ranks, with those that fill them up to a whole border."""
        return _filled(self.rows // tensor)

    @cached_property
    def _blocks(self) -> list[tuple[int, str, int]]:
        """(group, name, rows a unit of the group) in block order."""
        blocks = [(i, name, size) for i, rows in enumerate(self._rows) for name, size in rows.items()]
        return sorted(blocks, key=lambda block: block[2] % BORDER != 0)

    @property
    def _unit_rows(self) -> int:
        return self.rows // self.units

    def in_block_order(self, weight: Tensor) -> Tensor:
        """The rows of some whole layer units, weight [rows, h], in block order, with rows of zeros behind up to a whole border."""
        return _InBlockOrder.apply(weight, *self._order(weight.shape[0] // self._unit_rows, weight.device))

    def _order(self, units: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Which row stands where in block order, and the other way round."""
        if (units, device) not in self._orders:
            order = self._block_order(units)
            self._orders[units, device] = order.to(device), order.argsort().to(device)
        return self._orders[units, device]

    def _block_order(self, units: int) -> Tensor:
        rows = torch.arange(units * self._unit_rows).unflatten(0, (units, -1))
        parts = rows.split([inside * sum(rows.values()) for inside, rows in zip(self._inside, self._rows)], dim=1)
        by_name = [
            dict(zip(rows, part.unflatten(1, (inside, -1)).split(list(rows.values()), dim=2)))
            for part, inside, rows in zip(parts, self._inside, self._rows)
        ]
        return torch.cat([by_name[group][name].flatten() for group, name, _ in self._blocks])

    def cut(self, projected: Tensor) -> list[dict[str, Tensor]]:
        """[..., rows of some whole layer units in block order] -> for each group its named rows, views [..., units of the group, size]."""
        assert self._unit_rows >= BORDER, "else the rows of zeros could be taken for units"
        units = projected.shape[-1] // self._unit_rows
        counts = [units * self._inside[group] * size for group, _, size in self._blocks]
        parts: list[dict[str, Tensor]] = [{} for _ in self._rows]
        for (group, name, size), begin, count in zip(self._blocks, accumulate(counts, initial=0), counts):
            parts[group][name] = projected.narrow(-1, begin, count).unflatten(-1, (-1, size))
        return [{name: part[name] for name in rows} for part, rows in zip(parts, self._rows)]

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


def _filled(rows: int) -> int:
    return -(-rows // BORDER) * BORDER


class _InBlockOrder(torch.autograd.Function):
    """By index both ways: torch's gradient of an index adds rows up one after the other."""

    @staticmethod
    def forward(ctx, weight: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        rows = len(order)
        if _filled(rows) == rows:
            return weight.index_select(0, order)
        arranged = weight.new_empty(_filled(rows), weight.shape[1])
        torch.index_select(weight, 0, order, out=arranged[:rows])
        arranged[rows:] = 0
        return arranged

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.index_select(0, ctx.back), None, None
