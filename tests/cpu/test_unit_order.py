"""The input projection's rows: stored unit by unit, multiplied block by block."""

import pytest
import torch

from hybrid_megatron.config import load_recipe
from hybrid_megatron.model.mixer_layer import cut_batch_first
from hybrid_megatron.model.mixers import MIXERS
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.model.unit_order import BORDER, UnitOrder

PATTERNS = {
    "gdn, LH": "[{mixer: gdn}]",
    "gdn + nope, HH": "[{heads: [{mixer: gdn, share: 3}, {mixer: attention, position: nope}]}]",
    "gdn + gla + mamba2, HH": "[{heads: [{mixer: gdn}, {mixer: gla, share: 2}, {mixer: mamba2, share: 3}]}]",
    "grouped queries, HH": "[{heads: [{mixer: swa}, {mixer: gdn}, {mixer: attention, position: rope, share: 2}]}]",
}


def order_of(name: str) -> tuple[UnitOrder, list[list[tuple[str, int]]], list[int]]:
    """12 heads of 16; for each group its named rows a unit, and how many units of it are in a layer unit."""
    sizes = ["model.num_heads=12", "model.head_dim=16", "model.hidden_size=32", "model.num_layers=1", "data.train=unused"]
    if name.startswith("grouped"):
        sizes.append("model.num_kv_heads=6")
    config = load_recipe(["776m+rope+pretrain_4k", *sizes, f"pattern={PATTERNS[name]}"])
    groups = plan_layers(config).layers[0].groups
    order = UnitOrder(config.model, groups)
    rows = [list(MIXERS[group.mixer].rows(config.model, group).items()) for group in groups]
    return order, rows, [MIXERS[group.mixer].units(config.model, group) // order.units for group in groups]


@pytest.mark.parametrize("name", PATTERNS)
def test_every_row_is_found_by_its_name(name):
    """For one tensor rank and for two, row numbers walked through as they are stored."""
    order, rows, inside = order_of(name)
    for units in (order.units, order.units // 2 or 1):
        expected: list[dict[str, list]] = [{row: [] for row, _ in group} for group in rows]
        number = 0
        for _ in range(units):
            for group, count in enumerate(inside):
                for _ in range(count):
                    for row, size in rows[group]:
                        expected[group][row].append(list(range(number, number + size)))
                        number += size
        weight = torch.arange(number, dtype=torch.float64)[:, None]
        parts = order.cut(order.in_block_order(weight)[:, 0])
        assert [{row: part.tolist() for row, part in group.items()} for group in parts] == expected
        assert [list(group) for group in parts] == [[row for row, _ in group] for group in rows]


@pytest.mark.parametrize("name", PATTERNS)
def test_wide_rows_begin_on_borders(name):
    order, rows, _ = order_of(name)
    projected = torch.zeros(3, 2, order.computed_rows(1))
    assert projected.shape[-1] % BORDER == 0 and 0 <= projected.shape[-1] - order.rows < BORDER
    for group, part in zip(rows, order.cut(projected)):
        for row, size in group:
            assert size % BORDER or part[row].storage_offset() % BORDER == 0


def test_filling_rows_have_no_gradient():
    """The gates of nine gdn heads are 18 rows, no whole border; memory that nobody has written to is NaN here."""
    order, _, _ = order_of("gdn + nope, HH")
    assert order.computed_rows(1) > order.rows
    weight = torch.randn(order.rows, 32, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(5, 2, 32, dtype=torch.float64, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        parts = cut_batch_first(hidden @ order.in_block_order(weight).T, order)
        sum(part.square().sum() for group in parts for part in group.values()).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    plain = weight.detach().requires_grad_(), hidden.detach().requires_grad_()
    (plain[1] @ plain[0].T).square().sum().backward()
    torch.testing.assert_close(weight.grad, plain[0].grad)
    torch.testing.assert_close(hidden.grad, plain[1].grad)
