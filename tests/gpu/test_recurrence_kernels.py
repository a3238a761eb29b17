"""FLA's kernels behind the linear mixers' recurrences against the definition, token by token in float64, from the very same rounded inputs.
The gated delta rule has tests/gpu/test_gated_delta_rule.py.

bfloat16: one rounding is 2^-9 = 2e-3 relative at most, half that in the norm; sums, final states and the gates' gradients are float32. The
kernels round decayed queries and keys or values, scores, updates and the states between chunks once each (the states of mamba2's backward
pass stay float32). A few roundings side by side: 1e-2 bounds all. Two mixers' gates get more:

- kda: as for the gated delta rule, FLA 0.6.0 sums what a chunk's first state gives to a channel's gate in bf16 (kda/chunk_bwd.py,
  b_h * b_dh along the values, 64 or 128 terms): off by the roundings of that sum for all tokens of the chunk alike, at random
  sqrt(128) 2^-9 = 2e-2, so 3e-2 is the bound of the gradient of g, and its steps within chunks are held to 1e-2.
- rwkv7: a and b stand in the triangular system of a chunk, whose inverse is rounded too, and so are its inputs' gradients, as is the
  gradient of g, a difference of such terms: 2e-2 bounds all.

float32 goes through TF32: 11 bits, 2e-3.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron import platform
from hybrid_megatron.ops.fixed_decay import FixedDecay, lightning_log_decay
from hybrid_megatron.ops.generalized_delta_rule import STRONGEST_GATE
from tests.cpu.recurrence_cases import formula_of, rule_of
from tests.definitions import relative_error
from tests.gpu import kernel_check

DEVICE = platform.device()
BATCH, HEADS = 2, 4
BOUND = {"gla": 1e-2, "kda": 1e-2, "lightning": 1e-2, "mamba2": 1e-2, "rwkv7": 2e-2}
BOUND_OF_G = {"kda": 3e-2}
FLOAT32_BOUND = 2e-3
LINEAR_GATES = {"log gates 0": 0.0, "log gates -30": -30.0, "log gates -10000": -1e4}
GATES = {
    "gla": LINEAR_GATES,
    "kda": LINEAR_GATES,
    "lightning": {"log decay 0": 0.0, "log decay -1": -1.0, "log decay -1.4": -1.4},
    "mamba2": LINEAR_GATES,
    "rwkv7": {"log gates 0": 0.0, "log gates -0.001": -1e-3, "log gates -0.61": STRONGEST_GATE},
}
"""Gates that forget nothing and the strongest: Lightning's is above -1 and its kernels allow -1.4; rwkv7's allow its own strongest one."""

both_widths = pytest.mark.parametrize("width", [64, 128])
all_kinds = pytest.mark.parametrize("kind", BOUND)


def draw(
    kind: str,
    length: int,
    width: int,
    values: int | None = None,
    gate: float | None = None,
    most_beta: float = 1.0,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[list[Tensor], Tensor]:
    """A recurrence's inputs, in `dtype` but for gates and beta, and an initial state; log gates of a fresh model or all `gate`."""
    torch.manual_seed(0)

    def normal(*channels: int) -> Tensor:
        return torch.randn(BATCH, length, HEADS, *channels, device=DEVICE)

    values = values or width
    q, k = normal(width), normal(width)
    more = []
    if kind == "rwkv7":
        q, k = q * width**-0.5, k * width**-0.5
        removed, g = F.normalize(normal(width), dim=-1), STRONGEST_GATE * torch.sigmoid(normal(width))
        v = normal(values)
        more = [(-removed).to(dtype), (removed * torch.rand_like(k)).to(dtype)]
    else:
        v = normal(values)
    if kind == "gla":
        g = F.logsigmoid(normal(width)) / 16
    elif kind == "mamba2":
        g = -F.softplus(normal() - 2)
    elif kind == "kda":
        q, k, g = F.normalize(q, dim=-1), F.normalize(k, dim=-1), -F.softplus(normal(width) - 2)
        more = [torch.rand(BATCH, length, HEADS, device=DEVICE) * most_beta]
    gates = [] if kind == "lightning" else [g if gate is None else torch.full_like(g, gate)]
    return [*(x.to(dtype) for x in (q, k, v)), *gates, *more], torch.randn(BATCH, HEADS, width, values, device=DEVICE)


def check(
    kind: str,
    case: str,
    inputs: list[Tensor],
    state: Tensor | None,
    starts: Tensor | None = None,
    bound: float | None = None,
    log_decay: Tensor | None = None,
) -> None:
    """`log_decay`: of Lightning's heads, if not its own."""
    if kind == "lightning":
        rule = FixedDecay((lightning_log_decay(HEADS) if log_decay is None else log_decay).to(DEVICE))
    else:
        rule = rule_of(kind)
    full = inputs[0].dtype == torch.float32
    kernel_check.check(
        f"{BATCH} x {inputs[0].shape[1]} x {HEADS}, width {inputs[0].shape[3]}, {case}",
        bound or (FLOAT32_BOUND if full else BOUND[kind]),
        rule,
        formula_of(rule),
        inputs,
        state,
        starts,
        bound_of_g=None if full else BOUND_OF_G.get(kind),
    )


@both_widths
@pytest.mark.parametrize("length", [1, 63, 65, 1000])
@all_kinds
def test_output_state_and_gradients(kind, length, width):
    check(kind, "initial state", *draw(kind, length, width))


@both_widths
@all_kinds
def test_no_initial_state(kind, width):
    check(kind, "no initial state", draw(kind, 200, width)[0], None)


@both_widths
@all_kinds
def test_many_short_documents(kind, width):
    """Five tokens each on average, some one alone, about one of 150; the first row begins amid a document, the second with one."""
    starts = torch.rand(BATCH, 1000, generator=torch.Generator().manual_seed(0)) < 0.2
    starts[:, 300:450] = False
    starts[0, 0], starts[1, 0] = False, True
    check(kind, "initial state, many short documents", *draw(kind, 1000, width), starts.to(DEVICE))


@both_widths
@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind, cases in GATES.items() for case in cases])
def test_gates_that_keep_all_and_the_strongest_ones(kind, case, width):
    gate = GATES[kind][case]
    log_decay = torch.full((HEADS,), gate) if kind == "lightning" else None
    check(kind, f"initial state, {case}", *draw(kind, 200, width, gate=gate), log_decay=log_decay)


@both_widths
@pytest.mark.parametrize("kind", ["gla", "kda", "mamba2"])
def test_strong_gates_among_weak_ones(kind, width):
    """Every seventh token forgets all, the others next to nothing, and where rows have gates of their own half of them keep everything."""
    inputs, state = draw(kind, 200, width, gate=-0.01)
    inputs[3][:, ::7] = -30.0
    if kind != "mamba2":
        inputs[3][..., ::2] = 0.0
    check(kind, "initial state, strong gates among weak ones", inputs, state)


@both_widths
@pytest.mark.parametrize("kind", ["kda", "mamba2"])
def test_float32(kind, width):
    check(kind, "float32, initial state", *draw(kind, 200, width, dtype=torch.float32))


@pytest.mark.parametrize("kind", ["kda"])
def test_beta_up_to_two(kind):
    """Transitions with negative eigenvalues."""
    check(kind, "initial state, beta up to 2", *draw(kind, 200, 128, most_beta=2.0), bound=2e-2)


@both_widths
@pytest.mark.parametrize("kind", ["kda", "rwkv7"])
def test_wider_values_than_keys(kind, width):
    """What context parallelism and windows compute a span's summary with."""
    check(kind, f"values {2 * width}, initial state", *draw(kind, 160, width, values=2 * width))


@pytest.mark.parametrize(("kind", "width", "alive"), [("kda", 128, 0.1), ("rwkv7", 64, 0.05), ("rwkv7", 128, 0.05)])
def test_a_summary_turns_the_first_state_into_the_last(kind, width, alive):
    """Few tokens or weak gates, so that something is left of the first state: more than `alive` of the last one."""
    if kind == "kda":
        inputs, state = draw(kind, 40, width)
        inputs[3] *= 0.05
    else:
        inputs, state = draw(kind, 192, width, gate=-0.01)
    rule = rule_of(kind)
    transition, added = rule.summary(tuple(inputs))
    exact = [x.double() for x in inputs]
    _, last = formula_of(rule)(*exact, 1.0, state.double())
    _, alone = formula_of(rule)(*exact, 1.0)
    assert relative_error(alone, last) > alive
    assert relative_error(added, alone) <= BOUND[kind]
    assert relative_error(rule.apply(transition, state), last - alone) <= BOUND[kind]


@pytest.mark.parametrize("kind", ["rwkv7"])
def test_long_sample(kind):
    """4,096 tokens at the width of a training, gates that keep a state over a chunk."""
    check(kind, "no initial state, log gates -0.02", draw(kind, 4096, 128, gate=-0.02)[0], None)
