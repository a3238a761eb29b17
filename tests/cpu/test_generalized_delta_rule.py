"""What the generalized delta rule has alone. The rest: tests/cpu/test_recurrence_forms.py."""

import pytest
import torch

from hybrid_megatron.ops.generalized_delta_rule import GeneralizedDeltaRule
from tests.cpu.recurrence_cases import check, draw, draw_state, forms_of
from tests.definitions import relative_error

RULE = GeneralizedDeltaRule()
FORMS = tuple(forms_of(RULE))


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
