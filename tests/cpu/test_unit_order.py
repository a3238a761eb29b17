"""The input projection's rows: stored unit by unit, multiplied block by block."""

import pytest
import torch

from hybrid_megatron.config import load_recipe
from hybrid_megatron.model import mixer_layer
from hybrid_megatron.model.hybrid_model import build_model
from hybrid_megatron.model.mixer_layer import cut_batch_first
from hybrid_megatron.model.mixers import MIXERS
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.model.unit_order import BORDER, UnitOrder
from hybrid_megatron.ops.gradient_place import place_of_gradient
from hybrid_megatron.parallel import SequenceLayout, start
from tests.cpu.tiny import tiny_config
from tests.cpu.zoo import MATRIX

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


class TwiceInPlace(torch.autograd.Function):
    """As a kernel that writes its input's gradient where it belongs."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.place = place_of_gradient(x)
        return 2 * x

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return torch.mul(2, grad, out=ctx.place())


@pytest.mark.parametrize("used_twice", [False, True])
def test_gradients_written_in_place(monkeypatch, used_twice):
    """By kernels that know the place of a slice, or of heads within it, and others that do not; two uses of a slice are added up."""
    order, rows, _ = order_of("gdn + nope, HH")
    projected = torch.randn(5, 2, order.computed_rows(1), dtype=torch.float64, requires_grad=True)
    copied = []
    monkeypatch.setattr(mixer_layer, "copy_rows", lambda source, target: (copied.append(source), target.copy_(source)))

    def loss(parts: list[dict[str, torch.Tensor]], twice) -> torch.Tensor:
        gdn, attention = parts
        total = twice(gdn["q"]).square().sum() + twice(attention["v"].unflatten(-1, (2, -1)).flatten(2, 3)).square().sum()
        if used_twice:
            total = total + twice(gdn["q"]).sin().sum()
        rest = [part[name] for part, known in ((gdn, "q"), (attention, "v")) for name in part if name != known]
        return total + sum(x.cos().sum() for x in rest)

    for _ in range(2):  # the second pass has a gradient of its own
        copied.clear()
        projected.grad = None
        whole = projected * 1
        loss(cut_batch_first(whole, order), TwiceInPlace.apply).backward()
        found, expected = (
            projected.grad,
            torch.autograd.grad(loss(order.cut((projected * 1).transpose(0, 1)), lambda x: 2 * x), projected)[0],
        )
        torch.testing.assert_close(found, expected)
        assert len(copied) in ((len(rows[0]) + len(rows[1]) - 2,) if not used_twice else range(len(rows[0]) + len(rows[1])))


@pytest.mark.parametrize("name", ["gdn, LH", "gdn + nope, HH", "attention rope, LH"])
def test_slices_of_a_layer_know_their_places(monkeypatch, tiny_data, name):
    """The projection that megatron-core's linear layer gives is no view of another tensor."""
    config = tiny_config(tiny_data, "run_dir=unused", *MATRIX[name])
    cut, known = mixer_layer.cut_batch_first, []

    def looked_at(projected, order):
        parts = cut(projected, order)
        known.extend(place_of_gradient(x) is not None for part in parts for x in part.values())
        return parts

    monkeypatch.setattr(mixer_layer, "cut_batch_first", looked_at)
    with start(config.parallel, 0) as state:
        [layer, *_] = build_model(config, plan_layers(config), state).decoder.layers
        hidden = torch.randn(64, 2, config.model.hidden_size, requires_grad=True)
        layer.self_attention(hidden, packed_seq_params=SequenceLayout(64))
    assert known and all(known)
