"""FLA's kernels behind `ScalarDecay` against the recurrence, token by token in float64.

bfloat16: one rounding is 2^-9 = 2e-3 relative at most, half that in the norm; the kernels round scores, decayed values and in the forward
pass the states between chunks once each, and sums, the states of the backward pass, the final state and the gates' gradients are float32.
A few roundings side by side: 1e-2 bounds all. float32 goes through TF32: 11 bits, 2e-3.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.ops.scalar_decay import ScalarDecay
from tests import definitions
from tests.gpu import kernel_check

BATCH, HEADS = 2, 4
BOUND = {torch.bfloat16: 1e-2, torch.float32: 2e-3}


def draw(length: int, width: int, gate: float | None = None, dtype=torch.bfloat16) -> tuple[list[Tensor], Tensor]:
    """q, k, v, log gates of a fresh model or all `gate`, and the initial state, on the GPU."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(BATCH, length, HEADS, width, device="cuda").to(dtype) for _ in range(3))
    g = -F.softplus(torch.randn(BATCH, length, HEADS, device="cuda") - 2)
    state = torch.randn(BATCH, HEADS, width, width, device="cuda")
    return [q, k, v, g if gate is None else torch.full_like(g, gate)], state


def check(case: str, inputs: list[Tensor], state: Tensor | None, starts: Tensor | None = None) -> None:
    label = f"{BATCH} x {inputs[0].shape[1]} x {HEADS}, width {inputs[0].shape[3]}, {case}"
    kernel_check.check(label, BOUND[inputs[0].dtype], ScalarDecay(), definitions.scalar_decay, inputs, state, starts)


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
    check(f"initial state, log gates {gate:g}", *draw(200, width, gate))


@pytest.mark.parametrize("width", [64, 128])
def test_strong_gates_among_weak_ones(width):
    """Every seventh token forgets all, the others next to nothing."""
    inputs, state = draw(200, width, -0.01)
    inputs[3][:, ::7] = -30.0
    check("initial state, strong gates among weak ones", inputs, state)


@pytest.mark.parametrize("width", [64, 128])
def test_float32(width):
    check("float32, initial state", *draw(200, width, dtype=torch.float32))
