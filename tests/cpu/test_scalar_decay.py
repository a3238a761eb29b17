"""Linear attention with one gate a head, token by token and in chunks of 16, against its definition, tests/definitions.py: outputs, last
state and every gradient to 1e-12 (relative norm) in float64."""

import pytest
import torch

from hybrid_megatron.ops.gated_linear_attention import GatedLinearAttention
from hybrid_megatron.ops.scalar_decay import ScalarDecay
from tests.cpu.recurrence_cases import EXACT, check, definition_of, draw, draw_state, forms_of, results, starts_at
from tests.definitions import relative_error

RULE = ScalarDecay()
FORMS = tuple(forms_of(RULE))
STARTS = {
    "at the first token": ((0,), (0,)),
    "one row alone": ((), (70,)),
    "at chunk borders": ((16, 128), (15, 17, 64)),
    "one after the other": ((0, 1, 2, 3), (10, 11, 12, 16)),
    "every token": (tuple(range(150)), ()),
}
GATES = {"keep all": 0.0, "keep nearly all": -1e-3, "forget": -30.0, "forget all": -1e4, "at odds": -0.01}


def gates(kind: str, inputs: tuple) -> tuple:
    """The inputs with other gates; at odds: every seventh token forgets all, the others next to nothing."""
    q, k, v, g = inputs
    g = torch.full_like(g, GATES[kind])
    if kind == "at odds":
        g[:, ::7] = -1e4
    return q, k, v, g


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 65, 150])
def test_lengths(form, length):
    inputs = draw("mamba2", length)
    check(RULE, form, inputs, draw_state(inputs))


@pytest.mark.parametrize("form", FORMS)
def test_no_initial_state_is_a_zero_one(form):
    inputs = draw("mamba2", 65)
    check(RULE, form, inputs)
    zero = torch.zeros_like(draw_state(inputs))
    for mine, other in zip(forms_of(RULE)[form](inputs, None, None), forms_of(RULE)[form](inputs, zero, None)):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("widths", [(16, 32), (8, 3), (1, 1)])
def test_keys_and_values_of_different_widths(form, widths):
    inputs = draw("mamba2", 70, 3, *widths)
    check(RULE, form, inputs, draw_state(inputs))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("starts", STARTS)
def test_document_starts(form, starts):
    inputs = draw("mamba2", 150)
    check(RULE, form, inputs, draw_state(inputs), starts_at(150, *STARTS[starts]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", GATES)
def test_extreme_gates(form, kind):
    """Strong gates cost weak ones beside them no digits: no difference of sums of gates is taken."""
    inputs = gates(kind, draw("mamba2", 65))
    check(RULE, form, inputs, draw_state(inputs))


@pytest.mark.parametrize("form", FORMS)
def test_the_same_gate_in_every_channel_is_gated_linear_attention(form):
    q, k, v, g = draw("mamba2", 100)
    state, starts = draw_state((q, k, v)), starts_at(100, (0, 40), (63,))
    wide = (q, k, v, g[..., None].expand(*g.shape, q.shape[-1]))
    for mine, theirs in zip(forms_of(RULE)[form]((q, k, v, g), state, starts), definition_of(GatedLinearAttention())(wide, state, starts)):
        assert relative_error(mine, theirs) <= EXACT


@pytest.mark.parametrize("kind", [None, *GATES])
def test_float32(kind):
    """Each product carries 2^-24 = 6e-8, each exponent that of a sum of 16 gates: 2e-6. Nothing adds up but undamped states."""
    inputs = draw("mamba2", 150)
    check(RULE, "chunked", inputs if kind is None else gates(kind, inputs), draw_state(inputs), bound=2e-6, dtype=torch.float32)


def test_bfloat16_is_computed_in_float32():
    """Gates and states stay float32. Rounded to bf16, by 2^-9 at most: the output, its gradient, and those of bf16 inputs."""
    inputs = tuple(x.float() if i == 3 else x.bfloat16() for i, x in enumerate(draw("mamba2", 65)))
    state = draw_state(inputs).float()
    found = results(forms_of(RULE)["chunked"], inputs, state, None, RULE.input_names)
    exact = results(definition_of(RULE), tuple(x.double() for x in inputs), state.double(), None, RULE.input_names)
    assert found["output"].dtype == torch.bfloat16 and found["last state"].dtype == found["gradient of g"].dtype == torch.float32
    for name, expected in exact.items():
        bound = {"output": 2**-9, "last state": 1e-5}.get(name, 2 * 2**-9)
        assert relative_error(found[name], expected) <= bound, name
