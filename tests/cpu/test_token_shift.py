"""Projections of tokens mixed with the ones before them, whole and over context ranks, against the formula written out token by token."""

import pytest
import torch
from torch import Tensor

from hybrid_megatron.ops.token_shift import shifted_projections
from hybrid_megatron.parallel import SequenceLayout
from tests.cpu import op_cells
from tests.definitions import relative_error

BATCH, LENGTH, HIDDEN, OUT = 2, 48, 6, (5, 3, 6)
STARTS = {
    "none": None,
    "documents": ((0, 1, 12, 30), (6, 7, 24, 47)),  # at and about the borders of chunks of 6 and 12
    "every token": (tuple(range(LENGTH)), ()),
}


def starts_of(name: str) -> Tensor | None:
    if STARTS[name] is None:
        return None
    return torch.tensor([[place in row for place in range(LENGTH)] for row in STARTS[name]])


def draw() -> tuple[Tensor, ...]:
    """x, mixes, weights in float64."""
    random = torch.Generator().manual_seed(0)
    shapes = ((BATCH, LENGTH, HIDDEN), (len(OUT), HIDDEN), *((out, HIDDEN) for out in OUT))
    return tuple(torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes)


def by_formula(x: Tensor, mixes: Tensor, weights: tuple[Tensor, ...], starts: Tensor | None) -> list[Tensor]:
    rows = []
    for b in range(len(x)):
        for t in range(LENGTH):
            alone = t == 0 or (starts is not None and bool(starts[b, t]))
            before = torch.zeros_like(x[b, t]) if alone else x[b, t - 1]
            rows.append([weight @ (x[b, t] + mix * (before - x[b, t])) for mix, weight in zip(mixes, weights)])
    return [torch.stack(outputs).view(BATCH, LENGTH, -1) for outputs in zip(*rows)]


def expected(starts: Tensor | None) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(outputs, weights of their sum, gradients of x, mixes and the matrices)."""
    leaves = [tensor.clone().requires_grad_() for tensor in draw()]
    outputs = by_formula(*leaves[:2], tuple(leaves[2:]), starts)
    random = torch.Generator().manual_seed(1)
    sums = [torch.randn(y.shape, generator=random, dtype=torch.float64) for y in outputs]
    sum((y * w).sum() for y, w in zip(outputs, sums)).backward()
    return [y.detach() for y in outputs], sums, [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("starts", STARTS)
def test_is_the_formula(starts):
    outputs, sums, gradients = expected(starts_of(starts))
    leaves = [tensor.clone().requires_grad_() for tensor in draw()]
    layout = SequenceLayout(LENGTH, document_starts=starts_of(starts))
    found = shifted_projections(*leaves[:2], tuple(leaves[2:]), layout, None)
    sum((y * w).sum() for y, w in zip(found, sums)).backward()
    for mine, exact in zip([*found, *(leaf.grad for leaf in leaves)], [*outputs, *gradients]):
        assert relative_error(mine, exact) <= 1e-14


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("size", [2, 4])
def test_over_context_ranks(ranks, size, starts):
    """Each rank has its part of the gradients of mixes and matrices."""
    outputs, sums, (of_x, *of_rest) = expected(starts_of(starts))
    answers = ranks.run(size, op_cells.shift_over_ranks, size, list(draw()), sums, starts_of(starts))
    for positions, found, (mine_of_x, *_) in answers:
        for mine, exact in zip([*found, mine_of_x], [*outputs, of_x]):
            assert relative_error(mine, exact[:, positions]) <= 1e-14
    for mine, exact in zip((sum(parts) for parts in zip(*(rest for _, _, (_, *rest) in answers))), of_rest):
        assert relative_error(mine, exact) <= 1e-14


def test_keeps_its_input_alone():
    """Mixes are made again in the backward pass: what is kept is x, the token before each chunk, and parameters."""
    x, mixes, *weights = (tensor.requires_grad_() for tensor in draw())
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.shape
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        shifted_projections(x, mixes, tuple(weights), SequenceLayout(LENGTH), None)
    for tensor in (x, mixes, *weights):
        del kept[tensor.untyped_storage().data_ptr()]
    assert list(kept.values()) == [(BATCH, 1, HIDDEN)]


def test_bfloat16_rounds_the_mix_once():
    x, mixes, *weights = (tensor.bfloat16() for tensor in draw())
    found = shifted_projections(x, mixes, tuple(weights), SequenceLayout(LENGTH), None)
    exact = by_formula(x.double(), mixes.double(), tuple(w.double() for w in weights), None)
    for mine, theirs in zip(found, exact):
        assert mine.dtype == torch.bfloat16 and relative_error(mine, theirs) <= 2 * 2**-9


def test_bfloat16_is_mixed_in_float32():
    """With matrices that change nothing: each mix is the exact one rounded, and so is the gradient of x where no token has one before."""
    x, mixes, *_ = (tensor.bfloat16() for tensor in draw())
    eye = torch.eye(HIDDEN, dtype=torch.bfloat16)
    for starts in (starts_of("documents"), torch.ones(BATCH, LENGTH, dtype=torch.bool)):
        mine, exact = (x.clone().requires_grad_(), x.double().requires_grad_())
        found = shifted_projections(mine, mixes, (eye,) * len(OUT), SequenceLayout(LENGTH, document_starts=starts), None)
        expected = by_formula(exact, mixes.double(), (eye.double(),) * len(OUT), starts)
        assert all(torch.equal(y, z.bfloat16()) for y, z in zip(found, expected))
    gradients = [y.detach().roll(1, 0) for y in found]
    torch.autograd.backward(found, gradients)
    torch.autograd.backward(expected, [gradient.double() for gradient in gradients])
    assert torch.equal(mine.grad, exact.grad.bfloat16())
