"""The delta rule with a gate of each channel, token by token and in chunks of 16, against its definition, tests/definitions.py: outputs,
last state and every gradient to 1e-12 (relative norm) in float64."""

import pytest
import torch

from hybrid_megatron.ops.gated_delta_rule import GatedDeltaRule
from hybrid_megatron.ops.kimi_delta_rule import KimiDeltaRule
from tests.cpu.recurrence_cases import EXACT, SCALE, check, definition_of, draw, draw_state, forms_of, results, starts_at
from tests.definitions import relative_error

RULE = KimiDeltaRule()
FORMS = tuple(forms_of(RULE))
STARTS = {
    "at the first token": ((0,), (0,)),
    "one row alone": ((), (70,)),
    "at chunk borders": ((16, 128), (15, 17, 64)),
    "one after the other": ((0, 1, 2, 3), (10, 11, 12, 16)),
    "every token": (tuple(range(150)), ()),
}
GATES = ("keep all", "keep nearly all", "forget", "forget all", "at odds in time", "at odds in the state")


def gates(kind: str, inputs: tuple) -> tuple:
    """The inputs with other gates."""
    q, k, v, g, beta = inputs
    g = torch.full_like(g, {"keep all": 0.0, "keep nearly all": -1e-3, "forget": -30.0, "forget all": -1e4}.get(kind, -0.01))
    if kind == "at odds in time":
        g[:, ::7] = -1e4
    elif kind == "at odds in the state":
        g[..., ::2] = -1e4
        g[..., 1] = 0.0
    return q, k, v, g, beta


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 65, 150])
def test_lengths(form, length):
    inputs = draw("kda", length)
    check(RULE, form, inputs, draw_state(inputs))


@pytest.mark.parametrize("form", FORMS)
def test_no_initial_state_is_a_zero_one(form):
    inputs = draw("kda", 65)
    check(RULE, form, inputs)
    zero = torch.zeros_like(draw_state(inputs))
    for mine, other in zip(forms_of(RULE)[form](inputs, None, None), forms_of(RULE)[form](inputs, zero, None)):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("widths", [(16, 32), (8, 3), (1, 1)])
def test_keys_and_values_of_different_widths(form, widths):
    inputs = draw("kda", 40, 3, *widths)
    check(RULE, form, inputs, draw_state(inputs))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("starts", STARTS)
def test_document_starts(form, starts):
    inputs = draw("kda", 150)
    check(RULE, form, inputs, draw_state(inputs), starts_at(150, *STARTS[starts]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", GATES)
def test_extreme_gates(form, kind):
    """Strong gates cost weak ones beside them no digits: no difference of sums of gates is taken."""
    inputs = gates(kind, draw("kda", 65))
    check(RULE, form, inputs, draw_state(inputs))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("beta", [0.0, 1.0, 1.99])
def test_beta_at_its_ends(form, beta):
    """1.99 turns the state over along each key; 1 projects the key away; 0 writes nothing. Undamped, so errors would grow."""
    *rest, old = gates("keep all", draw("kda", 130))
    inputs = (*rest, torch.full_like(old, beta))
    check(RULE, form, inputs, draw_state(inputs))


@pytest.mark.parametrize("form", FORMS)
def test_the_order_of_gate_and_key(form):
    """The state decays before the key reads it: a second token with the same key and beta 1 leaves nothing but its own value there."""
    eye = torch.eye(4, dtype=torch.float64)
    k = (eye[0] + eye[1]).div(2**0.5).expand(1, 2, 1, 4)
    v = torch.tensor([1.0, 10.0], dtype=torch.float64).view(1, 2, 1, 1)
    g = torch.tensor([0.0, -2.0, 0.0, 0.0], dtype=torch.float64).expand(1, 2, 1, 4)
    _, last = forms_of(RULE)[form]((k, k, v, g, torch.ones(1, 2, 1, dtype=torch.float64)), None, None)
    assert float(torch.einsum("bnk,bnkv->bnv", k[:, 1], last)) == pytest.approx(10, rel=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_one_gate_for_all_channels_is_the_gated_delta_rule(form):
    q, k, v, g, beta = draw("gdn", 100)
    state, starts = draw_state((q, k, v)), starts_at(100, (0, 40), (63,))
    wide = (q, k, v, g[..., None].expand(*g.shape, q.shape[-1]), beta)
    narrow = definition_of(GatedDeltaRule())((q, k, v, g, beta), state, starts)
    for mine, theirs in zip(forms_of(RULE)[form](wide, state, starts), narrow):
        assert relative_error(mine, theirs) <= EXACT


def test_a_summary_is_update_and_transition():
    """The transition is the product of the tokens' matrices, the latest on the left, gates and keys in their order."""
    q, k, v, g, beta = draw("kda", 40)
    eye, product = torch.eye(8, dtype=torch.float64), torch.eye(8, dtype=torch.float64).expand(2, 3, 8, 8)
    for t in range(40):
        outer = torch.einsum("bni,bnj->bnij", k[:, t], k[:, t])
        product = (eye - beta[:, t, :, None, None] * outer) * g[:, t, :, None, :].exp() @ product
    transition, added = RULE.summary((q, k, v, g, beta))
    assert relative_error(transition, product) <= EXACT
    assert relative_error(added, definition_of(RULE)((q, k, v, g, beta), None, None)[1]) <= EXACT


@pytest.mark.parametrize("kind", [None, *GATES])
def test_float32(kind):
    """Each product carries 2^-24 = 6e-8, each exponent that of a sum of 16 gates: 2e-6. Undamped steps with beta up to 2 add up over all
    150 tokens: 150 2^-24 = 9e-6."""
    inputs = draw("kda", 150)
    bound = 9e-6 if kind in ("keep all", "keep nearly all", "at odds in the state") else 2e-6
    check(RULE, "chunked", inputs if kind is None else gates(kind, inputs), draw_state(inputs), bound=bound, dtype=torch.float32)


def test_bfloat16_is_computed_in_float32():
    """Gates, beta and states stay float32. Rounded to bf16, by 2^-9 at most: the output, its gradient, and those of bf16 inputs."""
    inputs = tuple(x.float() if i > 2 else x.bfloat16() for i, x in enumerate(draw("kda", 65)))
    state = draw_state(inputs).float()
    found = results(forms_of(RULE)["chunked"], inputs, state, None, RULE.input_names)
    exact = results(definition_of(RULE), tuple(x.double() for x in inputs), state.double(), None, RULE.input_names)
    assert found["output"].dtype == torch.bfloat16 and found["last state"].dtype == found["gradient of g"].dtype == torch.float32
    for name, expected in exact.items():
        bound = {"output": 2**-9, "last state": 1e-5}.get(name, 2 * 2**-9)
        assert relative_error(found[name], expected) <= bound, name


def test_the_cpu_takes_the_chunked_form():
    """In float32 the two forms round differently."""
    inputs = tuple(x.float() for x in draw("kda", 70))
    fast, _ = RULE.run(inputs, scale=SCALE)
    slow, _ = RULE.recurrent(inputs, scale=SCALE)
    assert not torch.equal(fast, slow) and relative_error(fast, slow) <= 2e-6
