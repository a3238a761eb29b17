"""FLA's kernels behind `FixedDecay` against the recurrence, token by token in float64.

bfloat16: one rounding is 2^-9 = 2e-3 relative at most, half that in the norm; the kernels round scores, decayed values and the states
between chunks once each, and sums and the final state are float32. A few roundings side by side: 1e-2 bounds all.
"""

import pytest
import torch
from torch import Tensor

from hybrid_megatron.ops.fixed_decay import FixedDecay, lightning_log_decay
from tests import definitions
from tests.gpu import kernel_check

BATCH, HEADS, BOUND = 2, 4, 1e-2


def draw(length: int, width: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v in bf16 and the initial state, on the GPU."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(BATCH, length, HEADS, width, device="cuda").bfloat16() for _ in range(3))
    return [q, k, v], torch.randn(BATCH, HEADS, width, width, device="cuda")


def check(case: str, inputs: list[Tensor], state: Tensor | None, starts: Tensor | None = None, log_decay: Tensor | None = None) -> None:
    log_decay = (lightning_log_decay(HEADS) if log_decay is None else log_decay).cuda()

    def definition(q, k, v, *rest):
        return definitions.fixed_decay(q, k, v, log_decay.double(), *rest)

    label = f"{BATCH} x {inputs[0].shape[1]} x {HEADS}, width {inputs[0].shape[3]}, {case}"
    kernel_check.check(label, BOUND, FixedDecay(log_decay), definition, inputs, state, starts)


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
@pytest.mark.parametrize("log_decay", [0.0, -1.0, -1.4])
def test_decays_that_forget_nothing_and_the_strongest_ones(width, log_decay):
    """Lightning's strongest is above -1; the kernels allow -1.4."""
    check(f"initial state, log decay {log_decay:g}", *draw(200, width), log_decay=torch.full((HEADS,), log_decay))
