"""Linear attention with a fixed decay, token by token and in chunks of 64, against its definition, tests/definitions.py: outputs, last
state and every gradient to 1e-12 (relative norm) in float64."""

import pytest
import torch

from hybrid_megatron.ops.fixed_decay import FixedDecay, lightning_log_decay
from tests.cpu.recurrence_cases import check, definition_of, draw, draw_state, forms_of, results, starts_at
from tests.definitions import relative_error

RULE = FixedDecay(lightning_log_decay(3))
FORMS = tuple(forms_of(RULE))
STARTS = {
    "at the first token": ((0,), (0,)),
    "one row alone": ((), (70,)),
    "at chunk borders": ((64, 128), (63, 65)),
    "one after the other": ((0, 1, 2, 3), (10, 11, 12, 64)),
    "every token": (tuple(range(150)), ()),
}


@pytest.mark.parametrize("heads", [1, 3, 8, 12])
def test_lightnings_decays(heads):
    """HypeNet, equation 19, also where the number of heads is no power of two: head H decays by 2^-8 a token."""
    expected = [-(2.0 ** (-8 * h / heads)) for h in range(1, heads + 1)]
    assert lightning_log_decay(heads).tolist() == pytest.approx(expected, rel=1e-15)
    assert lightning_log_decay(heads)[-1] == -(2.0**-8)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 65, 150])
def test_lengths(form, length):
    """Also those that end within a chunk: the last state decays by the tokens there are."""
    inputs = draw("lightning", length)
    check(RULE, form, inputs, draw_state(inputs))


@pytest.mark.parametrize("form", FORMS)
def test_no_initial_state_is_a_zero_one(form):
    inputs = draw("lightning", 65)
    check(RULE, form, inputs)
    zero = torch.zeros_like(draw_state(inputs))
    for mine, other in zip(forms_of(RULE)[form](inputs, None, None), forms_of(RULE)[form](inputs, zero, None)):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("widths", [(16, 32), (8, 3), (1, 1)])
def test_keys_and_values_of_different_widths(form, widths):
    inputs = draw("lightning", 70, 3, *widths)
    check(RULE, form, inputs, draw_state(inputs))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("starts", STARTS)
def test_document_starts(form, starts):
    inputs = draw("lightning", 150)
    check(RULE, form, inputs, draw_state(inputs), starts_at(150, *STARTS[starts]))


@pytest.mark.parametrize("form", FORMS)
def test_decays_that_keep_everything_and_decays_that_keep_nothing(form):
    inputs = draw("lightning", 130)
    check(FixedDecay(torch.tensor([0.0, -30.0, -1e4], dtype=torch.float64)), form, inputs, draw_state(inputs))


@pytest.mark.parametrize("case", ["lightning", "documents", "keeps everything"])
def test_float32(case):
    """Each product carries 2^-24 = 6e-8 and each power 64 times that at most, where it is small: 2e-6."""
    inputs = draw("lightning", 150)
    rule = FixedDecay(torch.zeros(3)) if case == "keeps everything" else RULE
    starts = starts_at(150, (0, 1, 64, 140), (30,)) if case == "documents" else None
    check(rule, "chunked", inputs, draw_state(inputs), starts, 2e-6, torch.float32)


def test_bfloat16_is_computed_in_float32():
    """States stay float32. Rounded to bf16, by 2^-9 at most: the output, its gradient, and those of the inputs."""
    inputs = tuple(x.bfloat16() for x in draw("lightning", 130))
    state = draw_state(inputs).float()
    found = results(forms_of(RULE)["chunked"], inputs, state, None, RULE.input_names)
    exact = results(definition_of(RULE), tuple(x.double() for x in inputs), state.double(), None, RULE.input_names)
    assert found["output"].dtype == torch.bfloat16 and found["last state"].dtype == torch.float32
    for name, expected in exact.items():
        bound = {"output": 2**-9, "last state": 1e-5}.get(name, 2 * 2**-9)
        assert relative_error(found[name], expected) <= bound, name


def test_decays_in_bfloat16_are_refused():
    """0.9961 would become 1: a module turned to bf16 must not take its decays along."""
    with pytest.raises(AssertionError, match="decays in torch.bfloat16"):
        FixedDecay(lightning_log_decay(4).bfloat16())
