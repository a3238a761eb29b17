"""FLA's kernels behind `KimiDeltaRule` against the recurrence, token by token in float64, from the very same rounded inputs.

bfloat16: one rounding is 2^-9 = 2e-3 relative at most, half that in the norm; the kernels round decayed queries and keys, scores, updates
and the states between chunks once each, and the final state and the gates' sums are float32: 1e-2 bounds all but the gradient of g. There,
as for the gated delta rule, FLA 0.6.0 sums what a chunk's first state gives to a channel's gate in bf16 (kda/chunk_bwd.py, b_h * b_dh
along the values, 64 or 128 terms): off by the roundings of that sum for all tokens of the chunk alike, at random sqrt(128) 2^-9 = 2e-2, so
3e-2 is the bound, and its steps within chunks are held to 1e-2. float32 goes through TF32: 11 bits, 2e-3.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.ops.kimi_delta_rule import KimiDeltaRule
from tests import definitions
from tests.definitions import relative_error
from tests.gpu import kernel_check

BATCH, HEADS = 2, 4
BOUND = {torch.bfloat16: 1e-2, torch.float32: 2e-3}


def draw(
    length: int, width: int, values: int | None = None, gate: float | None = None, most_beta: float = 1.0, dtype=torch.bfloat16
) -> tuple[list[Tensor], Tensor]:
    """q, k, v, log gates of a fresh model or all `gate`, beta, and the initial state, on the GPU."""
    torch.manual_seed(0)
    q, k = (F.normalize(torch.randn(BATCH, length, HEADS, width, device="cuda"), dim=-1).to(dtype) for _ in range(2))
    v = torch.randn(BATCH, length, HEADS, values or width, device="cuda").to(dtype)
    g = -F.softplus(torch.randn(BATCH, length, HEADS, width, device="cuda") - 2)
    beta = torch.rand(BATCH, length, HEADS, device="cuda") * most_beta
    state = torch.randn(BATCH, HEADS, width, values or width, device="cuda")
    return [q, k, v, g if gate is None else torch.full_like(g, gate), beta], state


def check(case: str, inputs: list[Tensor], state: Tensor | None, starts: Tensor | None = None, bound: float | None = None) -> None:
    dtype = inputs[0].dtype
    label = f"{BATCH} x {inputs[0].shape[1]} x {HEADS}, width {inputs[0].shape[3]}, {case}"
    kernel_check.check(
        label, bound or BOUND[dtype], KimiDeltaRule(), definitions.kimi_delta_rule, inputs, state, starts,
        bound_of_g=3e-2 if dtype == torch.bfloat16 else None,
    )  # fmt: skip


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("length", [1, 63, 65, 1000])
def test_output_state_and_gradients(width, length):
    check("initial state", *draw(length, width))


@pytest.mark.parametrize("width", [64, 128])
def test_no_initial_state(width):
    check("no initial state", draw(200, width)[0], None)


@pytest.mark.parametrize("width", [64, 128])
def test_many_short_documents(width):
    """Five tokens each on average, some one alone, about one of 150; the first row begins amid a document, the second with one."""
    starts = torch.rand(BATCH, 1000, generator=torch.Generator().manual_seed(0)) < 0.2
    starts[:, 300:450] = False
    starts[0, 0], starts[1, 0] = False, True
    check("initial state, many short documents", *draw(1000, width), starts.cuda())


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("gate", [0.0, -30.0, -1e4])
def test_gates_that_forget_nothing_and_gates_that_forget_all(width, gate):
    check(f"initial state, log gates {gate:g}", *draw(200, width, gate=gate))


@pytest.mark.parametrize("width", [64, 128])
def test_strong_gates_among_weak_ones(width):
    """Every seventh token forgets all, the others next to nothing, and half of the state's rows keep everything."""
    inputs, state = draw(200, width, gate=-0.01)
    inputs[3][:, ::7] = -30.0
    inputs[3][..., ::2] = 0.0
    check("initial state, strong gates among weak ones", inputs, state)


def test_beta_up_to_two():
    """Transitions with negative eigenvalues."""
    check("initial state, beta up to 2", *draw(200, 128, most_beta=2.0), bound=2e-2)


@pytest.mark.parametrize("width", [64, 128])
def test_float32(width):
    check("float32, initial state", *draw(200, width, dtype=torch.float32))


@pytest.mark.parametrize("width", [64, 128])
def test_wider_values_than_keys(width):
    """What context parallelism and windows compute a span's summary with."""
    check(f"values {2 * width}, initial state", *draw(160, width, 2 * width))


def test_a_summary_turns_the_first_state_into_the_last():
    """Few tokens and weak gates, so that something is left of the first state."""
    (q, k, v, g, beta), state = draw(40, 128)
    g = g * 0.05
    transition, added = KimiDeltaRule().summary((q, k, v, g, beta))
    _, expected = definitions.kimi_delta_rule(*(x.double() for x in (q, k, v, g, beta)), 1.0, state.double())
    _, alone = definitions.kimi_delta_rule(*(x.double() for x in (q, k, v, g, beta)), 1.0)
    assert relative_error(added, alone) <= 1e-2
    assert relative_error(transition @ state, expected - alone) <= 1e-2 and relative_error(alone, expected) > 0.1
