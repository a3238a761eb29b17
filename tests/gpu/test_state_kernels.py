"""Passes over states alone, by FLA's kernels, against the recurrences' forms in torch, in float64, from the very same rounded inputs.

Bounds as in test_recurrence_kernels.py: a few roundings to bfloat16 of 2e-3 at most, relative to the norm of what is found. rwkv7's
transition over 200 tokens is next to zero, 5e-25.
"""

import pytest
import torch

from hybrid_megatron import platform
from hybrid_megatron.ops import state_passing
from hybrid_megatron.ops.kernel_check import example
from hybrid_megatron.parallel import SequenceLayout
from tests.cpu.recurrence_cases import KINDS

BATCH, TOKENS, HEADS = 2, 200, 4
BOUND = {"rwkv7": 2e-2}
DEVICES = (platform.device(), torch.device("cpu"))


def drawn(kind: str, width: int, dtype: torch.dtype):
    """(recurrence, inputs) on the GPU in `dtype`, and the same in float64 on the CPU."""
    (rule, inputs), (exact_rule, exact) = (example(kind, HEADS, width, dtype, device, BATCH, TOKENS) for device in DEVICES)
    return (rule, inputs), (exact_rule, tuple(x.double() for x in exact))


def documents(masked: bool) -> torch.Tensor | None:
    """The first row goes on from before, the second begins with a document and has none after; or two documents within chunks."""
    starts = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    starts[0, [70, 71, 150]] = starts[1, 0] = True
    return starts if masked else None


def check(name: str, mine: torch.Tensor, theirs: torch.Tensor, bound: float) -> None:
    error, norm = float((mine.cpu() - theirs).norm()), float(theirs.norm())
    print(f"{name}: {error / norm if norm else error:.1e}")
    assert error <= bound * max(norm, 1e-6), f"{name}: {error:.1e} of {norm:.1e}"


def on_the_gpu(starts: torch.Tensor | None) -> torch.Tensor | None:
    return None if starts is None else starts.to(DEVICES[0])


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_summary(kind, width, masked):
    (rule, inputs), (exact_rule, exact) = drawn(kind, width, torch.bfloat16)
    starts = documents(masked)
    found, expected = rule.summary(inputs, on_the_gpu(starts)), exact_rule.summary(exact, starts)
    for name, mine, theirs in zip(("transition", "added"), found, expected):
        assert mine.shape == theirs.shape and mine.dtype == torch.float32
        check(f"{kind} {width} {name}", mine, theirs, BOUND.get(kind, 1e-2))


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_the_first_state(kind, width, masked):
    (rule, inputs), (exact_rule, exact) = drawn(kind, width, torch.bfloat16)
    starts, scale = documents(masked), width**-0.5
    grad = torch.randn(BATCH, TOKENS, HEADS, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = rule.initial_state_gradient(inputs, grad.to(DEVICES[0]), scale=scale, document_starts=on_the_gpu(starts))
    expected = exact_rule.initial_state_gradient(exact, grad.double(), scale=scale, document_starts=starts)
    check(f"{kind} {width} gradient", found, expected, BOUND.get(kind, 1e-2))


@pytest.mark.parametrize("kind", KINDS)
def test_float32(kind):
    (rule, inputs), (exact_rule, exact) = drawn(kind, 64, torch.float32)
    grad = torch.randn(BATCH, TOKENS, HEADS, 64, generator=torch.Generator().manual_seed(1))
    found = (*rule.summary(inputs), rule.initial_state_gradient(inputs, grad.to(DEVICES[0]), scale=0.125))
    expected = (*exact_rule.summary(exact), exact_rule.initial_state_gradient(exact, grad.double(), scale=0.125))
    for name, mine, theirs in zip(("transition", "added", "gradient"), found, expected):
        check(f"{kind} float32 {name}", mine, theirs, 4e-3)  # TF32


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "rwkv7"])
def test_pieces_compute_what_the_whole_does(monkeypatch, kind, masked):
    """Output and gradients, each off by roundings of its own; gates by those of sums within chunks (test_recurrence_kernels.py)."""
    monkeypatch.setattr(state_passing, "_SHORTEST", 512)
    rule, inputs = example(kind, HEADS, 128, torch.bfloat16, DEVICES[0], BATCH, 4096)
    layout = SequenceLayout(4096)
    if masked:
        starts = torch.zeros(BATCH, 4096, dtype=torch.bool)
        starts[0, [0, 70, 1024, 3000]] = starts[1, 2000] = True
        layout = SequenceLayout(4096, document_starts=starts.to(DEVICES[0]))
    assert state_passing.pieces_of_a_chunk(rule, inputs[0], layout) == 8
    grad = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICES[0])

    def results(form) -> list[torch.Tensor]:
        leaves = tuple(x.detach().requires_grad_() for x in inputs)
        o = form(leaves)
        return [o.detach(), *torch.autograd.grad(o, leaves, grad)]

    found = results(lambda leaves: state_passing.recurrence_over_ranks(rule, leaves, 128**-0.5, layout, None))
    whole = results(lambda leaves: rule.run(leaves, scale=128**-0.5, document_starts=layout.document_starts)[0])
    for name, mine, theirs in zip(("output", *rule.input_names), found, whole):
        check(f"{kind} {name}", mine.double(), theirs.double().cpu(), 4e-2 if name in ("g", "beta") else 1e-2)
