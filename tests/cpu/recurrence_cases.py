"""The linear mixers' recurrences as the tests meet them: random inputs, the definition of each, and the comparison of a form with it."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.ops.fixed_decay import FixedDecay, lightning_log_decay
from hybrid_megatron.ops.gated_delta_rule import GatedDeltaRule, chunked
from hybrid_megatron.ops.gated_linear_attention import GatedLinearAttention
from hybrid_megatron.ops.generalized_delta_rule import STRONGEST_GATE, GeneralizedDeltaRule
from hybrid_megatron.ops.kimi_delta_rule import KimiDeltaRule
from hybrid_megatron.ops.recurrence import Recurrence
from hybrid_megatron.ops.scalar_decay import ScalarDecay
from tests import definitions

KINDS = ("gdn", "gla", "kda", "lightning", "mamba2", "rwkv7")
SCALE = 0.3
EXACT = 1e-12
"""Relative norm in float64."""

LOG_GATES = {"keep all": 0.0, "keep nearly all": -1e-3, "strongest of RWKV-7": STRONGEST_GATE, "forget": -30.0, "forget all": -1e4}
_OF_ROWS = ("keep all", "keep nearly all", "forget", "forget all", "at odds in time", "at odds in the state")
GATES = {
    "gdn": ("keep all", "keep nearly all", "forget", "at odds in time"),
    "gla": _OF_ROWS,
    "kda": _OF_ROWS,
    "mamba2": _OF_ROWS[:-1],
    "rwkv7": (*_OF_ROWS, "strongest of RWKV-7"),
}
"""Extreme gates for `with_gates`. gdn takes differences of sums of gates, so that gates of -10,000 cost the others digits."""

type Form = Callable[[tuple[Tensor, ...], Tensor | None, Tensor | None], tuple[Tensor, Tensor]]
"""(inputs, initial state, document starts) -> (output, last state), scaled by SCALE."""


def rule_of(kind: str, heads: int = 3) -> Recurrence:
    if kind == "lightning":
        return FixedDecay(lightning_log_decay(heads))
    rules = {"gdn": GatedDeltaRule, "gla": GatedLinearAttention, "kda": KimiDeltaRule, "mamba2": ScalarDecay, "rwkv7": GeneralizedDeltaRule}
    return rules[kind]()


def draw(kind: str, length: int, heads: int = 3, width_k: int = 8, width_v: int = 6, batch: int = 2) -> tuple[Tensor, ...]:
    """Inputs in float64: unit q and k, gates of a fresh model, beta in (0, 2); rwkv7's a and b remove up to all of a unit direction."""
    random = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    q, k = (F.normalize(normal(batch, length, heads, width_k), dim=-1) for _ in range(2))
    v = normal(batch, length, heads, width_v)
    if kind in ("gdn", "kda"):
        channels = () if kind == "gdn" else (width_k,)
        return q, k, v, -F.softplus(normal(batch, length, heads, *channels) - 2), 2 * torch.sigmoid(normal(batch, length, heads))
    if kind == "mamba2":
        return q, k, v, -F.softplus(normal(batch, length, heads) - 2)
    if kind == "rwkv7":
        g = -torch.sigmoid(normal(batch, length, heads, width_k) - 1) * 0.6
        removed = F.normalize(normal(batch, length, heads, width_k), dim=-1)
        return q, k, v, g, -removed, removed * torch.sigmoid(normal(batch, length, heads, width_k))
    return (q, k, v, F.logsigmoid(normal(batch, length, heads, width_k)) / 4) if kind == "gla" else (q, k, v)


def with_gates(kind: str, case: str, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The inputs with the gates of one of GATES: all the same, or some that forget everything among others that forget next to nothing."""
    g = torch.full_like(inputs[3], LOG_GATES.get(case, -0.01))
    if case == "at odds in time":
        g[:, ::7] = LOG_GATES["forget" if kind == "gdn" else "forget all"]
    elif case == "at odds in the state":
        g[..., ::2] = LOG_GATES["forget all"]
        g[..., 1] = 0.0
    return *inputs[:3], g, *inputs[4:]


def draw_state(inputs: tuple[Tensor, ...]) -> Tensor:
    shape = inputs[0].shape[0], inputs[0].shape[2], inputs[1].shape[-1], inputs[2].shape[-1]
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def starts_at(length: int, *rows: tuple[int, ...]) -> Tensor:
    starts = torch.zeros(len(rows), length, dtype=torch.bool)
    for row, places in zip(starts, rows):
        row[list(places)] = True
    return starts


def formula_of(rule: Recurrence) -> Callable[..., tuple[Tensor, Tensor]]:
    """(inputs one by one, scale, initial state, starts) -> (output, last state), from tests/definitions.py alone; only a fixed decay's
    numbers are the rule's."""
    return {
        GatedDeltaRule: definitions.gated_delta_rule,
        GatedLinearAttention: definitions.gated_linear_attention,
        KimiDeltaRule: definitions.kimi_delta_rule,
        ScalarDecay: definitions.scalar_decay,
        GeneralizedDeltaRule: definitions.generalized_delta_rule,
        FixedDecay: lambda q, k, v, *rest: definitions.fixed_decay(q, k, v, rule.log_decay.to(k.dtype), *rest),
    }[type(rule)]


def definition_of(rule: Recurrence) -> Form:
    return lambda inputs, state, starts: formula_of(rule)(*inputs, SCALE, state, starts)


def forms_of(rule: Recurrence) -> dict[str, Form]:
    def form(method: Callable) -> Form:
        return lambda inputs, state, starts: method(inputs, scale=SCALE, initial_state=state, document_starts=starts)

    forms = {"recurrent": form(rule.recurrent), "chunked": form(rule.run)}
    if type(rule) is GatedDeltaRule:
        forms["chunks of 16"] = form(lambda inputs, **more: chunked(*inputs, **more, chunk=16))
    return forms


def results(
    form: Form, inputs: tuple[Tensor, ...], state: Tensor | None, starts: Tensor | None, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """Output, last state and the gradients of a random sum of both."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    first = None if state is None else state.detach().clone().requires_grad_()
    o, last = form(tuple(leaves), first, starts)
    random = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=random, dtype=torch.float64) for x in (o, last)]
    sum((x.double() * w).sum() for x, w in zip((o, last), weights)).backward()
    found = {"output": o.detach(), "last state": last.detach()} | {f"gradient of {name}": x.grad for name, x in zip(names, leaves)}
    return found if first is None else found | {"gradient of the initial state": first.grad}


def check(
    rule: Recurrence,
    form: str,
    inputs: tuple[Tensor, ...],
    state: Tensor | None = None,
    starts: Tensor | None = None,
    bound: float = EXACT,
    dtype: torch.dtype = torch.float64,
) -> None:
    """A form in `dtype` against the definition in float64, from the very same rounded inputs; all errors are relative norms."""
    inputs = tuple(x.to(dtype) for x in inputs)
    state = None if state is None else state.to(dtype)
    found = results(forms_of(rule)[form], inputs, state, starts, rule.input_names)
    wide = None if state is None else state.double()
    exact = results(definition_of(rule), tuple(x.double() for x in inputs), wide, starts, rule.input_names)
    # The gradient of a gate that lets nothing through is next to zero, a difference of terms q dL/dq that are not: measured against those.
    terms = inputs[0].double() * exact["gradient of q"]
    if "g" in rule.input_names and inputs[3].dim() < terms.dim():
        terms = terms.sum(-1)  # one gate for all channels has the sum of what each would have
    floors = {"gradient of g": float(terms.norm())}
    for name, expected in exact.items():
        assert found[name].isfinite().all(), name
        error = float((found[name].double() - expected).norm()) / max(float(expected.norm()), floors.get(name, 1e-30))
        assert error <= bound, f"{name}: {error:.2e}"
