"""The gated delta rule with the sequence cut over ranks against its definition over the whole sequence, in float64."""

import pytest
import torch

from tests import definitions
from tests.cpu import op_cells
from tests.cpu.test_gated_delta_rule import constant_gate, draw, starts_at
from tests.definitions import relative_error

LENGTH = 144
STARTS = {
    "none": None,
    "documents": starts_at(LENGTH, (0, 5, 35, 36, 100), (72, 143)),  # at, before and after the borders of chunks of 36 and 18
    "one document over all chunks": starts_at(LENGTH, (0,), (1,)),
}


@pytest.mark.parametrize("gate", [None, 0.0])
@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_the_whole(ranks, size, starts, gate):
    inputs = draw(LENGTH, 8, 6, state=False)[:5]
    if gate is not None:  # nothing decays: every state matters to the end
        inputs = constant_gate([*inputs, None], gate)[:5]
    weights = torch.randn(2, LENGTH, 3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected, _ = definitions.gated_delta_rule(*leaves, 0.3, starts=STARTS[starts])
    (expected * weights).sum().backward()
    for positions, o, gradients in ranks.run(size, op_cells.mixing_over_ranks, size, "states", inputs, weights, STARTS[starts], 0.3, rule):
        assert relative_error(o, expected[:, positions]) <= 1e-12
        for name, mine, whole in zip(("q", "k", "v", "g", "beta"), gradients, leaves):
            assert relative_error(mine, whole.grad[:, positions]) <= 1e-12, name
