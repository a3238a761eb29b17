"""FLA's kernels behind `GeneralizedDeltaRule` against the recurrence, token by token in float64, from the very same rounded inputs.

bfloat16: one rounding is 2^-9 = 2e-3 relative at most, half that in the norm. The kernels round the decayed q, k, a and b, the scores that
these make, what a token reads and the states between chunks once each; sums, gates and the final state are float32. A few roundings side
by side: 1e-2 for outputs and the gradients by q, k, v and the state; a and b stand in the triangular system of a chunk, whose inverse is
rounded too, and so are its inputs' gradients, as is the gradient of g, a difference of such terms: 2e-2 bounds all of theirs.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.ops.generalized_delta_rule import STRONGEST_GATE, GeneralizedDeltaRule
from tests import definitions
from tests.definitions import relative_error
from tests.gpu import kernel_check

BATCH, HEADS, BOUND = 2, 4, 2e-2
RULE = GeneralizedDeltaRule()


def draw(length: int, width: int, gate: float | None = None, values: int | None = None) -> tuple[list[Tensor], Tensor]:
    """q, k, v, a, b in bf16 and g in float32 as RWKV-7 makes them, all log gates `gate` if given; the initial state. On the GPU."""
    torch.manual_seed(0)
    q, k, removed, logits = (torch.randn(BATCH, length, HEADS, width, device="cuda") for _ in range(4))
    v = torch.randn(BATCH, length, HEADS, values or width, device="cuda")
    removed, rate = F.normalize(removed, dim=-1), torch.rand_like(k)
    g = STRONGEST_GATE * torch.sigmoid(logits) if gate is None else torch.full_like(logits, gate)
    q, k, v, a, b = (x.bfloat16() for x in (q * width**-0.5, k * width**-0.5, v, -removed, removed * rate))
    return [q, k, v, g, a, b], torch.randn(BATCH, HEADS, width, v.shape[-1], device="cuda")


def check(case: str, inputs: list[Tensor], state: Tensor | None, starts: Tensor | None = None) -> None:
    label = f"{BATCH} x {inputs[0].shape[1]} x {HEADS}, width {inputs[0].shape[3]}, {case}"
    kernel_check.check(label, BOUND, RULE, definitions.generalized_delta_rule, inputs, state, starts)


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
@pytest.mark.parametrize("gate", [0.0, -1e-3, STRONGEST_GATE])
def test_gates_that_keep_all_and_the_strongest_ones(width, gate):
    check(f"initial state, log gates {gate:.2g}", *draw(200, width, gate))


@pytest.mark.parametrize("width", [64, 128])
def test_wider_values_than_keys(width):
    """Values twice as wide: what context parallelism computes a chunk's summary with."""
    check(f"values {2 * width}, initial state", *draw(160, width, values=2 * width))


@pytest.mark.parametrize("width", [64, 128])
def test_a_summary_turns_the_first_state_into_the_last(width):
    inputs, state = draw(192, width, -0.01)
    transition, added = RULE.summary(tuple(inputs))
    _, last = definitions.generalized_delta_rule(*(x.double() for x in inputs), 1.0, state.double())
    _, alone = definitions.generalized_delta_rule(*(x.double() for x in inputs), 1.0)
    assert float((last - alone).norm()) > 0.05 * float(last.norm()), "the first state is alive at the end"
    assert relative_error(added, alone) <= BOUND
    assert relative_error(RULE.apply(transition, state), last - alone) <= BOUND


def test_long_sample():
    """4,096 tokens at the width of a training, gates that keep a state over a chunk."""
    check("no initial state, log gates -0.02", draw(4096, 128, -0.02)[0], None)
