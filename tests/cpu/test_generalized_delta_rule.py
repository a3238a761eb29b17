"""The generalized delta rule, token by token and in chunks of 16, against its definition, tests/definitions.py: outputs, last state and
every gradient to 1e-12 (relative norm) in float64."""

import pytest
import torch

from hybrid_megatron.ops.generalized_delta_rule import STRONGEST_GATE, GeneralizedDeltaRule
from tests.cpu.recurrence_cases import check, definition_of, draw, draw_state, forms_of, results, starts_at
from tests.definitions import relative_error

RULE = GeneralizedDeltaRule()
FORMS = tuple(forms_of(RULE))
STARTS = {
    "at the first token": ((0,), (0,)),
    "one row alone": ((), (70,)),
    "at chunk borders": ((16, 128), (15, 17, 64)),
    "one after the other": ((0, 1, 2, 3), (10, 11, 12, 16)),
    "every token": (tuple(range(150)), ()),
}


def gates(kind: str, inputs: tuple) -> tuple:
    """The inputs with other gates."""
    q, k, v, g, *rest = inputs
    g = torch.full_like(g, LOG_GATES.get(kind, -0.01))
    if kind == "at odds in time":
        g[:, ::7] = -1e4
    elif kind == "at odds in the state":
        g[..., ::2] = -1e4
        g[..., 1] = 0.0
    return q, k, v, g, *rest


LOG_GATES = {"keep all": 0.0, "keep nearly all": -1e-3, "strongest of RWKV-7": STRONGEST_GATE, "forget": -30.0, "forget all": -1e4}
GATES = (*LOG_GATES, "at odds in time", "at odds in the state")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 65, 150])
def test_lengths(form, length):
    inputs = draw("rwkv7", length)
    check(RULE, form, inputs, draw_state(inputs))


@pytest.mark.parametrize("form", FORMS)
def test_no_initial_state_is_a_zero_one(form):
    inputs = draw("rwkv7", 65)
    check(RULE, form, inputs)
    zero = torch.zeros_like(draw_state(inputs))
    for mine, other in zip(forms_of(RULE)[form](inputs, None, None), forms_of(RULE)[form](inputs, zero, None)):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("widths", [(16, 32), (8, 3), (1, 1)])
def test_keys_and_values_of_different_widths(form, widths):
    inputs = draw("rwkv7", 40, 3, *widths)
    check(RULE, form, inputs, draw_state(inputs))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("starts", STARTS)
def test_document_starts(form, starts):
    inputs = draw("rwkv7", 150)
    check(RULE, form, inputs, draw_state(inputs), starts_at(150, *STARTS[starts]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", GATES)
def test_extreme_gates(form, kind):
    """Strong gates cost weak ones beside them no digits: no difference of sums of gates is taken."""
    inputs = gates(kind, draw("rwkv7", 65))
    check(RULE, form, inputs, draw_state(inputs))


@pytest.mark.parametrize("form", FORMS)
def test_removal_of_all_and_beyond(form):
    """b = -2 a reflects what is removed: with gates of zero no state fades, and transitions have eigenvalues of -1. b = 0 adds up."""
    q, k, v, g, a, _ = draw("rwkv7", 65)
    for factor in (-2.0, 0.0):
        inputs = (q, k, v, torch.zeros_like(g), a, factor * a)
        check(RULE, form, inputs, draw_state(inputs))


@pytest.mark.slow  # importing fla takes longer than all of these tests
def test_flas_own_recurrence():
    """FLA's naive form: heads first, scale K^-1/2, in float32 within, whatever the inputs."""
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence

    inputs = draw("rwkv7", 50, 3, 8, 6)
    state = draw_state(inputs)
    q, k, v, g, a, b = (x.transpose(1, 2).float() for x in inputs)
    theirs, last = dplr_recurrence(q, k, v, a, b, g, initial_state=state.float())
    o, final = RULE.recurrent(inputs, scale=8**-0.5, initial_state=state)
    assert relative_error(theirs.transpose(1, 2), o) <= 2e-6 and relative_error(last, final) <= 2e-6


@pytest.mark.parametrize("kind", [None, *GATES])
def test_float32(kind):
    """Each product carries 2^-24 = 6e-8, each exponent that of a sum of 16 gates: 2e-6. Nothing adds up but undamped states."""
    inputs = draw("rwkv7", 150)
    check(RULE, "chunked", inputs if kind is None else gates(kind, inputs), draw_state(inputs), bound=2e-6, dtype=torch.float32)


def test_bfloat16_is_computed_in_float32():
    """Gates and states stay float32. Rounded to bf16, by 2^-9 at most: the output, its gradient, and those of bf16 inputs."""
    inputs = tuple(x.float() if i == 3 else x.bfloat16() for i, x in enumerate(draw("rwkv7", 65)))
    state = draw_state(inputs).float()
    found = results(forms_of(RULE)["chunked"], inputs, state, None, RULE.input_names)
    exact = results(definition_of(RULE), tuple(x.double() for x in inputs), state.double(), None, RULE.input_names)
    assert found["output"].dtype == torch.bfloat16 and found["last state"].dtype == found["gradient of g"].dtype == torch.float32
    for name, expected in exact.items():
        bound = {"output": 2**-9, "last state": 1e-5}.get(name, 2 * 2**-9)
        assert relative_error(found[name], expected) <= bound, name
