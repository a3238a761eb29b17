"""Each form of each linear mixer's recurrence, token by token and in chunks, against its definition, tests/definitions.py: outputs, last
state and every gradient to 1e-12 (relative norm) in float64. What one of them has alone lies in its own file."""

import pytest
import torch

from tests.cpu.recurrence_cases import (
    EXACT,
    GATES,
    KINDS,
    SCALE,
    check,
    definition_of,
    draw,
    draw_state,
    forms_of,
    results,
    rule_of,
    starts_at,
    with_gates,
)
from tests.definitions import relative_error

FORMS = [(kind, form) for kind in KINDS for form in forms_of(rule_of(kind))]
STARTS = {
    "at the first token": ((0,), (0,)),
    "one row alone": ((), (70,)),
    "at borders of 16": ((16, 128), (15, 17, 64)),
    "at borders of 64": ((64, 128), (63, 65)),
    "one after the other": ((0, 1, 2, 3), (10, 11, 12, 16, 64)),
    "the last token": ((149,), (148, 149)),
    "every token": (tuple(range(150)), ()),
}

all_forms = pytest.mark.parametrize(("kind", "form"), FORMS)
all_kinds = pytest.mark.parametrize("kind", KINDS)


@all_forms
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 128, 150, 200])
def test_lengths(kind, form, length):
    """Also those that end within a chunk: the last state decays by the tokens there are."""
    inputs = draw(kind, length)
    check(rule_of(kind), form, inputs, draw_state(inputs))


@all_forms
def test_no_initial_state_is_a_zero_one(kind, form):
    rule, inputs = rule_of(kind), draw(kind, 100)
    check(rule, form, inputs)
    zero = torch.zeros_like(draw_state(inputs))
    for mine, other in zip(forms_of(rule)[form](inputs, None, None), forms_of(rule)[form](inputs, zero, None)):
        assert torch.equal(mine, other)


@all_forms
@pytest.mark.parametrize("widths", [(16, 32), (8, 3), (8, 8), (1, 1)])
def test_widths_of_keys_and_values(kind, form, widths):
    inputs = draw(kind, 70, 3, *widths)
    check(rule_of(kind), form, inputs, draw_state(inputs))


@all_forms
@pytest.mark.parametrize("starts", STARTS)
def test_document_starts(kind, form, starts):
    inputs = draw(kind, 150)
    check(rule_of(kind), form, inputs, draw_state(inputs), starts_at(150, *STARTS[starts]))


@all_forms
def test_a_document_start_at_the_first_token_cuts_the_initial_state_off(kind, form):
    inputs = draw(kind, 80)
    state = draw_state(inputs).requires_grad_()
    o, last = forms_of(rule_of(kind))[form](inputs, state, starts_at(80, (0,), (30,)))
    (o.sum() + last.sum()).backward()
    assert torch.equal(state.grad[0], torch.zeros_like(state.grad[0])) and float(state.grad[1].norm()) > 0


@all_forms
@pytest.mark.parametrize("first", [40, 64, 100])
def test_documents_in_one_row_are_the_documents_apart(kind, form, first):
    """The second one crosses the border of a chunk."""
    inputs, run = draw(kind, 150, batch=1), forms_of(rule_of(kind))[form]
    together, last = run(inputs, None, starts_at(150, (0, first)))
    apart = [run(tuple(x[:, cut] for x in inputs), None, None) for cut in (slice(first), slice(first, None))]
    assert relative_error(together, torch.cat([o for o, _ in apart], 1)) <= EXACT
    assert relative_error(last, apart[1][1]) <= EXACT
    unmasked, _ = run(inputs, None, None)
    assert relative_error(unmasked, together) > 1e-3, "without document starts the first would leak into the second"


@all_forms
@pytest.mark.parametrize("first", [1, 50, 64, 130])
def test_a_state_handed_on_continues_the_sequence(kind, form, first):
    inputs, run = draw(kind, 150), forms_of(rule_of(kind))[form]
    whole, last = run(inputs, draw_state(inputs), None)
    front, state = run(tuple(x[:, :first] for x in inputs), draw_state(inputs), None)
    back, final = run(tuple(x[:, first:] for x in inputs), state, None)
    assert relative_error(torch.cat((front, back), 1), whole) <= EXACT and relative_error(final, last) <= EXACT


@pytest.mark.parametrize(("kind", "form", "gates"), [(kind, form, gates) for kind, form in FORMS for gates in GATES.get(kind, ())])
def test_extreme_gates(kind, form, gates):
    """Strong gates cost weak ones beside them no digits: but for gdn no difference of sums of gates is taken. Its sums reach 300 in a
    chunk, and the terms that matter are differences of 0.01: 300 2^-53 is 3e-14, summed 64 times."""
    inputs = with_gates(kind, gates, draw(kind, 130))
    check(rule_of(kind), form, inputs, draw_state(inputs))


@pytest.mark.parametrize(("kind", "form"), [(kind, form) for kind, form in FORMS if kind in ("gdn", "kda")])
@pytest.mark.parametrize("beta", [0.0, 1.0, 1.99])
def test_beta_at_its_ends(kind, form, beta):
    """1.99 turns the state over along each key; 1 projects the key away; 0 writes nothing. Undamped, so errors would grow."""
    *rest, old = with_gates(kind, "keep all", draw(kind, 130))
    inputs = (*rest, torch.full_like(old, beta))
    check(rule_of(kind), form, inputs, draw_state(inputs))


@pytest.mark.parametrize(
    ("kind", "gates"), [(kind, gates) for kind in ("gla", "kda", "mamba2", "rwkv7") for gates in ("of a fresh model", *GATES[kind])]
)
def test_float32(kind, gates):
    """Each product carries 2^-24 = 6e-8, each exponent that of a sum of 16 gates: 2e-6. Nothing adds up but undamped states, and kda's
    undamped steps with beta up to 2, over all 150 tokens: 150 2^-24 = 9e-6."""
    inputs = draw(kind, 150)
    inputs = inputs if gates == "of a fresh model" else with_gates(kind, gates, inputs)
    undamped = kind == "kda" and gates in ("keep all", "keep nearly all", "at odds in the state")
    check(rule_of(kind), "chunked", inputs, draw_state(inputs), bound=9e-6 if undamped else 2e-6, dtype=torch.float32)


@all_kinds
def test_bfloat16_is_computed_in_float32(kind):
    """Gates, beta and states stay float32. Rounded to bf16, by 2^-9 at most: the output, its gradient, and those of bf16 inputs."""
    rule, inputs = rule_of(kind), draw(kind, 130)
    inputs = tuple(x.float() if name in ("g", "beta") else x.bfloat16() for name, x in zip(rule.input_names, inputs))
    state = draw_state(inputs).float()
    found = results(forms_of(rule)["chunked"], inputs, state, None, rule.input_names)
    exact = results(definition_of(rule), tuple(x.double() for x in inputs), state.double(), None, rule.input_names)
    assert found["output"].dtype == torch.bfloat16 and found["last state"].dtype == torch.float32
    for name, expected in exact.items():
        bound = {"output": 2**-9, "last state": 1e-5}.get(name, 2 * 2**-9)
        assert relative_error(found[name], expected) <= bound, name


@all_kinds
def test_the_cpu_takes_the_chunked_form(kind):
    """In float32 the two forms round differently."""
    rule, inputs = rule_of(kind), tuple(x.float() for x in draw(kind, 70))
    fast, _ = rule.run(inputs, scale=SCALE)
    slow, _ = rule.recurrent(inputs, scale=SCALE)
    assert not torch.equal(fast, slow) and relative_error(fast, slow) <= 2e-6
