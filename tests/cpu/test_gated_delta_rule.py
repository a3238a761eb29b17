"""The recurrent and the chunked form of the gated delta rule against its definition, tests/definitions.py.

In float64 both must agree with it to 1e-12 (relative norm), outputs, last state and every gradient. In float32 a chunk sums up to 64 gates
and takes differences of those sums: a sum of |G| carries an error of |G| 2^-24, and e^(G_t - G_j) that much relative.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.ops.gated_delta_rule import chunked, gated_delta_rule, recurrent
from tests import definitions
from tests.definitions import relative_error

NAMES = ("q", "k", "v", "g", "beta", "initial_state")
EXACT = 1e-12


def draw(length: int, width_k: int = 8, width_v: int = 8, batch: int = 2, heads: int = 3, state: bool = True) -> list[Tensor | None]:
    """q, k, v, g, beta, initial state in float64: unit k and q, gates of a fresh model and beta in (0, 1)."""
    random = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    q, k = (F.normalize(normal(batch, length, heads, width_k), dim=-1) for _ in range(2))
    g = -F.softplus(normal(batch, length, heads) - 2)
    beta = torch.sigmoid(normal(batch, length, heads))
    return [q, k, normal(batch, length, heads, width_v), g, beta, normal(batch, heads, width_k, width_v) if state else None]


def starts_at(length: int, *rows: tuple[int, ...]) -> Tensor:
    starts = torch.zeros(len(rows), length, dtype=torch.bool)
    for row, places in zip(starts, rows):
        row[list(places)] = True
    return starts


def results(form: Callable, inputs: list[Tensor | None], starts: Tensor | None) -> dict[str, Tensor]:
    """Output, last state, the gradients of a random sum of both, and the terms whose differences the gradient of g is made of."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    o, final = form(*leaves, starts)
    random = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=random, dtype=torch.float64) for x in (o, final)]
    sum((x.double() * w).sum() for x, w in zip((o, final), weights)).backward()
    found = {"output": o.detach(), "last state": final.detach(), "terms of g": (o.detach().double() * weights[0]).sum(-1)}
    return found | {f"gradient of {name}": x.grad for name, x in zip(NAMES, leaves) if x is not None}


SCALE = 0.3
FORMS = {
    "recurrent": lambda q, k, v, g, beta, state, starts: recurrent(
        q, k, v, g, beta, scale=SCALE, initial_state=state, document_starts=starts
    ),
    "chunked": lambda q, k, v, g, beta, state, starts: chunked(q, k, v, g, beta, scale=SCALE, initial_state=state, document_starts=starts),
    "chunks of 16": lambda q, k, v, g, beta, state, starts: chunked(
        q, k, v, g, beta, scale=SCALE, initial_state=state, document_starts=starts, chunk=16
    ),
}


def definition(q, k, v, g, beta, state, starts) -> tuple[Tensor, Tensor]:
    return definitions.gated_delta_rule(q, k, v, g, beta, SCALE, state, starts)


def check(
    form: str, inputs: list[Tensor | None], starts: Tensor | None = None, bound: float = EXACT, dtype: torch.dtype = torch.float64
) -> None:
    narrow = [None if x is None else x.to(dtype) for x in inputs]
    found = results(FORMS[form], narrow, starts)
    exact = results(definition, [None if x is None else x.double() for x in narrow], starts)
    # The gradient of a gate that lets nothing through is next to zero, a difference of terms that are not: measured against those.
    floors = {"gradient of g": float(exact.pop("terms of g").norm())}
    for name, expected in exact.items():
        assert found[name].isfinite().all(), name
        error = float((found[name].double() - expected).norm()) / max(float(expected.norm()), floors.get(name, 1e-30))
        assert error <= bound, f"{name}: {error:.2e}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 2, 15, 63, 64, 65, 128, 200])
def test_lengths(form, length):
    check(form, draw(length))


@pytest.mark.parametrize("form", FORMS)
def test_no_initial_state_is_a_zero_one(form):
    check(form, draw(100, state=False))
    inputs = draw(100, state=False)
    zero = torch.zeros(2, 3, 8, 8, dtype=torch.float64)
    for mine, other in zip(FORMS[form](*inputs, None), FORMS[form](*inputs[:5], zero, None)):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("widths", [(16, 32), (8, 3), (1, 1)])
def test_keys_and_values_of_different_widths(form, widths):
    check(form, draw(70, *widths))


STARTS = {
    "at the first token": ((0,), (0,)),
    "one row alone": ((), (70,)),
    "at chunk borders": ((64, 128), (63, 65)),
    "one after the other": ((0, 1, 2, 3), (10, 11, 12, 64)),
    "the last token": ((149,), (148, 149)),
    "every token": (tuple(range(150)), ()),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("starts", STARTS)
def test_document_starts(form, starts):
    check(form, draw(150), starts_at(150, *STARTS[starts]))


@pytest.mark.parametrize("form", FORMS)
def test_a_document_start_at_the_first_token_cuts_the_initial_state_off(form):
    inputs = draw(80)
    inputs[5].requires_grad_()
    o, final = FORMS[form](*inputs, starts_at(80, (0,), (30,)))
    (o.sum() + final.sum()).backward()
    gradient = inputs[5].grad
    assert torch.equal(gradient[0], torch.zeros_like(gradient[0])) and float(gradient[1].norm()) > 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("first", [40, 64, 100])
def test_documents_in_one_row_are_the_documents_apart(form, first):
    """The second one crosses the border of a chunk."""
    inputs = draw(150, batch=1, state=False)
    together, last = FORMS[form](*inputs, starts_at(150, (0, first)))
    apart = [FORMS[form](*(x[:, cut] for x in inputs[:5]), None, None) for cut in (slice(first), slice(first, None))]
    assert relative_error(together, torch.cat([o for o, _ in apart], 1)) <= EXACT
    assert relative_error(last, apart[1][1]) <= EXACT
    unmasked, _ = FORMS[form](*inputs, None)
    assert relative_error(unmasked, together) > 1e-3, "without document starts the first would leak into the second"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("first", [1, 50, 64, 130])
def test_a_state_handed_on_continues_the_sequence(form, first):
    inputs = draw(150)
    whole, last = FORMS[form](*inputs, None)
    front, state = FORMS[form](*(x[:, :first] for x in inputs[:5]), inputs[5], None)
    back, final = FORMS[form](*(x[:, first:] for x in inputs[:5]), state, None)
    assert relative_error(torch.cat((front, back), 1), whole) <= EXACT and relative_error(final, last) <= EXACT


@pytest.mark.parametrize("form", FORMS)
def test_values_v_0_from_the_state_0_i_end_in_the_update_and_the_transition(form):
    q, k, v, g, beta, _ = draw(100)
    eye = torch.eye(8, dtype=torch.float64).expand(2, 3, 8, 8)
    g = g * 0.1  # so that something is left of the first state
    _, summary = FORMS[form](q, k, torch.cat((v, torch.zeros_like(v)), -1), g, beta, torch.cat((torch.zeros_like(eye), eye), -1), None)
    _, update = definitions.gated_delta_rule(q, k, v, g, beta, 1.0)
    transition = definitions.transition_product(k, g, beta)
    assert relative_error(summary[..., :8], update) <= EXACT and relative_error(summary[..., 8:], transition) <= EXACT


def constant_gate(inputs: list[Tensor | None], gate: float) -> list[Tensor | None]:
    inputs[3] = torch.full_like(inputs[3], gate)
    return inputs


def gates_at_odds(inputs: list[Tensor | None]) -> list[Tensor | None]:
    """Every seventh token forgets everything, the others next to nothing."""
    inputs[3] = torch.full_like(inputs[3], -0.01)
    inputs[3][:, ::7] = -30
    return inputs


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gate", [0.0, -1e-3, -30.0])
def test_gates_that_keep_everything_and_gates_that_keep_nothing(form, gate):
    check(form, constant_gate(draw(130), gate))


@pytest.mark.parametrize("form", FORMS)
def test_strong_and_weak_gates_side_by_side(form):
    """Sums of gates reach 300 in a chunk, and the terms that matter are differences of 0.01: 300 2^-53 is 3e-14, summed 64 times."""
    check(form, gates_at_odds(draw(130)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("beta", [0.0, 1.0, 1.99])
def test_beta_at_its_ends(form, beta):
    """1.99 turns the state over along each key; 1 projects the key away; 0 writes nothing. Undamped, so errors would grow."""
    inputs = constant_gate(draw(130), 0.0)
    inputs[4] = torch.full_like(inputs[4], beta)
    check(form, inputs)


@pytest.mark.parametrize("form", FORMS)
def test_one_key_for_all_tokens(form):
    """The hardest triangular system: every token overwrites what the one before it wrote, with beta near 2 and no decay."""
    inputs = constant_gate(draw(130), 0.0)
    inputs[1] = inputs[1][:, :1].expand_as(inputs[1]).contiguous()
    inputs[4] = torch.full_like(inputs[4], 1.99)
    check(form, inputs)


@pytest.mark.parametrize("case", ["plain", "documents", "keeps everything", "forgets everything", "beta 1.99"])
def test_float32(case):
    """Sums of 64 gates of about -0.2 carry 13 2^-24 = 8e-7 and each product 6e-8: 2e-6. Undamped steps with beta near 2 add up over
    all 200 tokens: 200 2^-24 = 1.2e-5."""
    inputs, starts, bound = draw(200), None, 2e-6
    if case == "documents":
        starts = starts_at(200, (0, 1, 64, 150), (30,))
    elif case == "keeps everything":
        inputs = constant_gate(inputs, 0.0)
    elif case == "forgets everything":
        inputs = constant_gate(inputs, -30.0)
    elif case == "beta 1.99":
        inputs, bound = constant_gate(inputs, 0.0), 1.2e-5
        inputs[4] = torch.full_like(inputs[4], 1.99)
    check("chunked", inputs, starts, bound, torch.float32)


def test_float32_with_strong_and_weak_gates_side_by_side():
    """Sums of gates reach 300: 300 2^-24 = 1.8e-5."""
    check("chunked", gates_at_odds(draw(130)), bound=1.8e-5, dtype=torch.float32)


def test_bfloat16_is_computed_in_float32():
    """Inputs bf16 but for gates and state. Rounded to bf16, by 2^-9 at most: the output, and its gradient and those of bf16 inputs."""
    inputs = [x.bfloat16() if i < 3 else x.float() for i, x in enumerate(draw(130))]
    found = results(FORMS["chunked"], inputs, None)
    exact = results(definition, [x.double() for x in inputs], None)
    assert found["output"].dtype == torch.bfloat16 and found["last state"].dtype == torch.float32
    for name in exact:
        bound = {"output": 2**-9, "last state": 1e-5, "terms of g": 2**-9}.get(name, 2 * 2**-9)
        assert relative_error(found[name], exact[name]) <= bound, name


def test_the_cpu_takes_the_chunked_form():
    inputs = draw(70)
    q, k, v, g, beta, state = inputs
    fast = gated_delta_rule(q, k, v, g, beta, scale=SCALE, initial_state=state)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(fast, FORMS["chunked"](*inputs, None)))
