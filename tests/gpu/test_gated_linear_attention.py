"""FLA's kernels behind `GatedLinearAttention` against the recurrence, token by token in float64.

bfloat16: one rounding is 2^-9 = 2e-3 relative at most, half that in the norm; the kernels round decayed queries and keys, scores and the
states between chunks once each, and sums, final state and the gates' gradients are float32. A few roundings side by side: 1e-2 bounds all.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.ops.gated_linear_attention import GatedLinearAttention
from tests import definitions
from tests.gpu import kernel_check

BATCH, HEADS, BOUND = 2, 4, 1e-2


def draw(length: int, width: int, gate: float | None = None) -> tuple[list[Tensor], Tensor]:
    """q, k, v in bf16, log gates of a fresh model or all `gate`, and the initial state, on the GPU."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(BATCH, length, HEADS, width, device="cuda").bfloat16() for _ in range(3))
    g = F.logsigmoid(torch.randn(BATCH, length, HEADS, width, device="cuda")) / 16
    state = torch.randn(BATCH, HEADS, width, width, device="cuda")
    return [q, k, v, g if gate is None else torch.full_like(g, gate)], state


def check(case: str, inputs: list[Tensor], state: Tensor | None, starts: Tensor | None = None) -> None:
    label = f"{BATCH} x {inputs[0].shape[1]} x {HEADS}, width {inputs[0].shape[3]}, {case}"
    kernel_check.check(label, BOUND, GatedLinearAttention(), definitions.gated_linear_attention, inputs, state, starts)


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
    """Every seventh token forgets all, the others next to nothing, and half of the state's rows keep everything."""
    inputs, state = draw(200, width, -0.01)
    inputs[3][:, ::7] = -30.0
    inputs[3][..., ::2] = 0.0
    check("initial state, strong gates among weak ones", inputs, state)
