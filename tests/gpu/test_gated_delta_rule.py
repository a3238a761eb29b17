"""FLA's kernels behind `gated_delta_rule` against the recurrence, token by token in float64, from the very same rounded inputs.

Errors are relative norms, ||x - x_ref|| / ||x_ref||. bfloat16 keeps 8 bits: one rounding is 2^-8 relative at most, under half of that in
the norm, and the kernels round their intermediate q, k, v, updates and states once each, so outputs and gradients stand at 2e-3 to 4e-3
(head dim 64 and 128, H200) and 1e-2 is the bound. The final state and everything's sums are float32, but for one: FLA 0.6.0 sums what a
chunk's first state gives to the gradient of its gates (chunk_o.py, b_h * b_dh), K V terms, in bf16. That is off by up to 2 % of the term,
for all tokens of the chunk alike, and the term is most of the gradient where a chunk is a token long or nothing decays. From the rounding
of such a sum over 128 x 128 terms by two warps the bound for the gradient of g is 6e-2; its steps within chunks are held to 1e-2. float32
inputs go through TF32 tensor cores, Triton's default: 11 bits, one rounding 5e-4 at most, bound 2e-3.
"""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.ops.gated_delta_rule import GatedDeltaRule, gated_delta_rule
from tests import definitions
from tests.definitions import relative_error
from tests.gpu import kernel_check

BOUND = {torch.bfloat16: 1e-2, torch.float32: 2e-3}


class Case(NamedTuple):
    batch: int
    length: int
    heads: int
    width_k: int
    width_v: int
    dtype: torch.dtype = torch.bfloat16
    initial_state: bool = False
    starts: tuple[tuple[int, ...], ...] | None = None
    """Document starts of each row."""
    gate: float = 1.0
    """Scale of the log gates: softplus of a normal number, negated, times this."""
    most_beta: float = 1.0


def draw(case: Case) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v, g, beta, initial state (or None) and document starts, on the GPU."""
    torch.manual_seed(0)
    b, s, n = case.batch, case.length, case.heads
    q, k = (F.normalize(torch.randn(b, s, n, case.width_k), dim=-1) for _ in range(2))
    v = torch.randn(b, s, n, case.width_v)
    g = -F.softplus(torch.randn(b, s, n)) * case.gate
    beta = torch.rand(b, s, n) * case.most_beta
    state = torch.randn(b, n, case.width_k, case.width_v) if case.initial_state else None
    starts = None
    if case.starts is not None:
        starts = torch.zeros(b, s, dtype=torch.bool)
        for row, places in enumerate(case.starts):
            starts[row, list(places)] = True
        starts = starts.cuda()
    lower = [x.to(case.dtype) for x in (q, k, v)]
    return [x if x is None else x.cuda() for x in (*lower, g, beta, state)], starts


def check(case: Case, bound: float | None = None, said: str = "") -> None:
    """`said` describes what is particular about the case, in the table of errors."""
    inputs, starts = draw(case)
    words = [f"{case.batch} x {case.length} x {case.heads}", f"width {case.width_k}"]
    words += [f"values {case.width_v}"] if case.width_v != case.width_k else []
    words += ["float32"] if case.dtype == torch.float32 else []
    words += ["initial state" if case.initial_state else "no initial state"]
    words += [said] if said else []
    for rule in (GatedDeltaRule(), GatedDeltaRule(keeps_states=True)):
        kernel_check.check(
            ", ".join([*words, *(["states kept"] if rule.keeps_states else [])]),
            bound or BOUND[case.dtype], rule, definitions.gated_delta_rule, inputs[:5], inputs[5], starts,
            bound_of_g=6e-2 if case.dtype == torch.bfloat16 else None,
        )  # fmt: skip


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("length", [1, 63, 65, 1000])
def test_output_state_and_gradients(width, length):
    """The shapes of a training: bf16, no state handed in; lengths that end within a chunk of 64."""
    check(Case(2, length, 12, width, width))


@pytest.mark.parametrize("width", [64, 128])
def test_initial_state(width):
    check(Case(2, 200, 12, width, width, initial_state=True))


STARTS = ((0, 1, 2, 70, 199), (50, 64, 128))  # one row begins with a document, one amid one; consecutive, on and off chunk borders


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("initial_state", [False, True])
def test_document_starts(width, initial_state):
    """Only the second row's first document sees the initial state; its gradient is zero for the first row."""
    check(Case(2, 200, 12, width, width, initial_state=initial_state, starts=STARTS), said="documents")


def test_a_row_without_starts_passes_its_state_through():
    check(Case(2, 130, 12, 64, 64, initial_state=True, starts=((), (0,))), said="a row without starts")


def test_initial_state_of_a_cut_row_has_no_gradient():
    inputs, starts = draw(Case(2, 100, 12, 64, 64, initial_state=True, starts=((0,), (10,))))
    state = inputs[5].requires_grad_()
    o, final = gated_delta_rule(*inputs[:5], scale=0.125, initial_state=state, document_starts=starts)
    (o.float().sum() + final.sum()).backward()
    assert torch.equal(state.grad[0], torch.zeros_like(state.grad[0])) and state.grad[1].norm() > 0


@pytest.mark.parametrize("starts", [None, ((0, 77), (10, 11))])
def test_wider_values_than_keys(starts):
    """K 128, V 256: what context parallelism computes a chunk's summary with."""
    check(Case(2, 160, 4, 128, 256, initial_state=True, starts=starts), said="documents" if starts else "")


def test_state_summary_is_update_and_transition():
    """Values [v | 0] from the state [0 | I] end in [U | M]: the state from zero, and the product of the transitions."""
    inputs, _ = draw(Case(2, 192, 12, 128, 128))
    q, k, v, g, beta, _ = inputs
    eye = torch.eye(128, device="cuda").expand(2, 12, 128, 128)
    padded = torch.cat((v, torch.zeros_like(v)), -1)
    _, summary = gated_delta_rule(q, k, padded, g, beta, scale=1.0, initial_state=torch.cat((torch.zeros_like(eye), eye), -1))
    k, v, g, beta = (x.double() for x in (k, v, g, beta))
    _, update = definitions.gated_delta_rule(k, k, v, g, beta, 1.0)
    assert relative_error(summary[..., :128], update) <= 1e-2
    # The gates leave next to nothing of the first state here, so the transition is compared where it is alive: over few tokens.
    short = [x[:, :40] for x in inputs[:5]]
    short[3] = short[3] * 0.05
    _, summary = gated_delta_rule(
        short[0], short[1], torch.cat((short[2], torch.zeros_like(short[2])), -1), short[3], short[4],
        scale=1.0, initial_state=torch.cat((torch.zeros_like(eye), eye), -1),
    )  # fmt: skip
    transition = definitions.transition_product(*(x.double() for x in (short[1], short[3], short[4])))
    assert float(transition.norm()) > 1
    assert relative_error(summary[..., 128:], transition) <= 1e-2


@pytest.mark.parametrize("width", [64, 128])
def test_many_short_documents(width):
    """Five tokens each on average, some one alone, about one of 150; the first row begins amid a document, the second with one."""
    begins = torch.rand(2, 1000, generator=torch.Generator().manual_seed(0)) < 0.2
    begins[:, 300:450] = False
    begins[0, 0], begins[1, 0] = False, True
    starts = tuple(tuple(row.nonzero()[:, 0].tolist()) for row in begins)
    check(Case(2, 1000, 12, width, width, initial_state=True, starts=starts), said="many short documents")


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("gate", [0.0, 0.01, 30.0])
def test_gates_that_keep_all_and_gates_that_keep_nothing(width, gate):
    """With g = 0 nothing decays and the state is a sum over all tokens."""
    check(Case(2, 200, 12, width, width, initial_state=True, gate=gate), said=f"log gates times {gate:g}")


def test_beta_up_to_two():
    """Transitions with negative eigenvalues."""
    check(Case(2, 200, 12, 128, 128, initial_state=True, most_beta=2.0), 2e-2, "beta up to 2")


@pytest.mark.parametrize("starts", [None, STARTS])
def test_float32(starts):
    check(Case(2, 200, 4, 64, 64, dtype=torch.float32, initial_state=True, starts=starts), said="documents" if starts else "")


def test_long_sample():
    """4,096 tokens at the heads and width of a training."""
    check(Case(1, 4096, 2, 128, 128, gate=0.05), said="log gates times 0.05")
