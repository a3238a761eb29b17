"""linear_cross_entropy against torch's cross entropy over the whole logits, alone and with the vocabulary cut over two ranks."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.ops import linear_cross_entropy as module
from hybrid_megatron.ops.linear_cross_entropy import linear_cross_entropy
from tests.cpu import op_cells
from tests.cpu.plan_cells import Allocated
from tests.definitions import relative_error

TOKENS, WIDTH, VOCAB = 50, 12, 96


class Alone:
    """A process group of one."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def draw(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, targets, token weights; the first targets lie at the ends and at both sides of the middle of the vocabulary."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=random, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCAB, WIDTH, generator=random, dtype=torch.float64).to(dtype)
    targets = torch.randint(VOCAB, (TOKENS,), generator=random)
    targets[:4] = torch.tensor([0, VOCAB // 2 - 1, VOCAB // 2, VOCAB - 1])
    weights = torch.rand(TOKENS, generator=random) * 2
    weights[10:13] = 0
    return hidden, weight, targets, weights


def exact(hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum, losses and gradients in float64."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    losses = F.cross_entropy(hidden @ weight.T, targets, reduction="none")
    total = (losses * weights.double()).sum()
    total.backward()
    return total.detach(), losses.detach(), hidden.grad, weight.grad


def found(hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    total, losses = linear_cross_entropy(hidden, weight, targets, weights, Alone())
    assert total.requires_grad and not losses.requires_grad
    total.backward()
    return total.detach(), losses, hidden.grad, weight.grad


def check(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], losses_bound: float, gradients_bound: float) -> None:
    for name, mine, theirs in zip(("sum", "losses"), found, expected):
        assert relative_error(mine, theirs) <= losses_bound, name
    for name, mine, theirs in zip(("hidden", "weight"), found[2:], expected[2:]):
        assert relative_error(mine, theirs) <= gradients_bound, f"gradient of {name}: {relative_error(mine, theirs):.1e}"


# All at once; 7 tokens at once, the last chunk shorter; one token at once, since not even one fits.
CHUNKS = [2**27, 7 * VOCAB, VOCAB // 2]


@pytest.mark.parametrize("chunk_elements", CHUNKS)
def test_float64(monkeypatch, chunk_elements):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_elements)
    inputs = draw()
    results = found(*inputs)
    check(results, exact(*inputs), 1e-12, 1e-12)
    assert results[1].dtype == torch.float64
    assert torch.equal(results[2][10:13], torch.zeros(3, WIDTH, dtype=torch.float64)), "a token of weight 0 moves nothing"
    assert bool((results[1][10:13] > 0).all()), "and still has a loss"


@pytest.mark.parametrize("chunk_elements", CHUNKS)
def test_float32(monkeypatch, chunk_elements):
    """Sums of 96 terms of 2^-24 each: 1e-6."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_elements)
    inputs = draw(torch.float32)
    results = found(*inputs)
    check(results, exact(*inputs), 1e-6, 1e-6)
    assert {x.dtype for x in results} == {torch.float32}


@pytest.mark.parametrize("chunk_elements", CHUNKS)
def test_bfloat16(monkeypatch, chunk_elements):
    """Logits and losses are float32; the gradient of the logits is rounded to bf16 once, and the results once: twice 2^-9."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_elements)
    inputs = draw(torch.bfloat16)
    results = found(*inputs)
    check(results, exact(*inputs), 1e-6, 2 * 2**-9)
    assert [x.dtype for x in results] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]


def test_the_gradient_is_scaled_by_what_comes_from_behind():
    hidden, weight, targets, weights = draw()
    plain = found(hidden, weight, targets, weights)
    hidden.requires_grad_(), weight.requires_grad_()
    (linear_cross_entropy(hidden, weight, targets, weights, Alone())[0] * -2.5).backward()
    assert torch.allclose(hidden.grad, -2.5 * plain[2], rtol=1e-12) and torch.allclose(weight.grad, -2.5 * plain[3], rtol=1e-12)


def test_the_scale_is_not_rounded():
    """A third is 0.2% larger in bf16: so would be all gradients."""
    inputs = draw(torch.bfloat16)
    plain = found(*inputs)
    hidden, weight = (x.clone().requires_grad_() for x in inputs[:2])
    (linear_cross_entropy(hidden, weight, *inputs[2:], Alone())[0] / 3).backward()
    for scaled, whole in ((hidden.grad, plain[2]), (weight.grad, plain[3])):
        assert torch.equal(scaled, (whole.float() * (torch.ones(()) / 3)).bfloat16())


@pytest.mark.parametrize("chunk_elements", CHUNKS)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 2**-9)])
def test_the_gradient_is_added_to_the_weights_buffer(monkeypatch, dtype, bound, chunk_elements):
    """In float32, to what is there: of bf16 only the gradient of the logits is rounded. Without a buffer nothing changes."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_elements)
    inputs = draw(dtype)
    plain, expected = found(*inputs), exact(*inputs)
    hidden, weight = (x.clone().requires_grad_() for x in inputs[:2])
    linear_cross_entropy(hidden, weight, *inputs[2:], Alone(), add_to_buffer=True)[0].backward()
    assert torch.equal(weight.grad, plain[3]) and not hasattr(weight, "grad_added_to_main_grad")

    start = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(1))
    weight.main_grad, weight.grad_added_to_main_grad, hidden.grad = start.clone(), False, None
    for _ in range(2):
        total, losses = linear_cross_entropy(hidden, weight, *inputs[2:], Alone(), add_to_buffer=True)
        total.backward()
        weight.grad = None  # not the gradient
    assert weight.grad_added_to_main_grad and torch.equal(losses, plain[1])
    assert relative_error(weight.main_grad - start, 2 * expected[3]) <= bound
    assert relative_error(hidden.grad, 2 * expected[2]) <= 2 * bound


def test_what_is_added_to_the_buffer_is_not_scaled_behind_it():
    inputs = draw(torch.float32)
    hidden, weight = (x.clone().requires_grad_() for x in inputs[:2])
    weight.main_grad = torch.zeros(VOCAB, WIDTH)
    total, _ = linear_cross_entropy(hidden, weight, *inputs[2:], Alone(), add_to_buffer=True)
    with pytest.raises(RuntimeError, match="that of the sum as it is"):
        (total / 3).backward()


def test_a_pass_without_gradients_leaves_the_buffer():
    inputs = draw(torch.float32)
    weight = inputs[1].clone().requires_grad_()
    weight.main_grad = torch.zeros(VOCAB, WIDTH)
    with torch.no_grad():
        linear_cross_entropy(inputs[0], weight, *inputs[2:], Alone(), add_to_buffer=True)
    assert not weight.main_grad.any()


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_needs_no_gradient_gets_none(frozen):
    inputs = draw()
    leaves = [x.clone().requires_grad_(i != frozen) for i, x in enumerate(inputs[:2])]
    linear_cross_entropy(*leaves, *inputs[2:], Alone())[0].backward()
    assert leaves[frozen].grad is None
    assert relative_error(leaves[1 - frozen].grad, exact(*inputs)[3 - frozen]) <= 1e-12


def test_without_gradients_it_computes_the_same_losses():
    inputs = draw()
    with torch.no_grad():
        total, losses = linear_cross_entropy(*inputs, Alone())
    assert not total.requires_grad and torch.equal(losses, found(*inputs)[1])


def test_without_gradients_it_forms_none(monkeypatch):
    """Inputs that require gradients, as a model's do: one product, the logits."""
    hidden, weight, *others = draw()
    products = []
    plain = module.matmul
    monkeypatch.setattr(module, "matmul", lambda *inputs: products.append(1) or plain(*inputs))
    with torch.no_grad():
        linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), *others, Alone())
    assert len(products) == 1


def test_without_gradients_there_is_one_chunk_of_logits_at_a_time(monkeypatch):
    """Of 7 tokens; results of 50 tokens and the targets of a chunk beside it."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 7 * VOCAB)
    inputs = draw()
    with torch.no_grad(), Allocated() as allocated:
        linear_cross_entropy(*inputs, Alone())
    assert 8 * 7 * VOCAB < allocated.most < 1.5 * 8 * 7 * VOCAB


def by_loss(known: Tensor, losses: Tensor) -> Tensor:
    return torch.exp(known - losses).clamp(max=1.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_elements", CHUNKS)
def test_weights_by_the_losses_are_those_of_an_earlier_pass(monkeypatch, dtype, chunk_elements):
    """In every chunk a token's weight is made of its own loss, and no gradient passes through it."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_elements)
    hidden, weight, targets, known = draw(dtype)
    known = known + 4
    losses = found(hidden, weight, targets, known)[1]
    weights = by_loss(known, losses)
    assert bool((weights == 1.5).any()) and bool((weights < 1).any())
    expected = found(hidden, weight, targets, weights)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    total, again = linear_cross_entropy(*leaves, targets, known, Alone(), by_loss)
    total.backward()
    for mine, theirs in zip((total.detach(), again, *(leaf.grad for leaf in leaves)), expected):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


@pytest.mark.parametrize("size", [1e4, -1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_of_ten_thousand(dtype, size):
    """The word of the largest logit, one far below it, and all logits equal: losses 0, 20,000 and log VOCAB; nothing overflows."""
    hidden = torch.zeros(3, WIDTH, dtype=dtype)
    hidden[:2, 0] = 1
    weight = torch.zeros(VOCAB, WIDTH, dtype=dtype)
    weight[:, 0] = -abs(size)
    weight[7, 0] = abs(size)
    targets = torch.tensor([7, 30, 11])
    inputs = hidden * (1 if size > 0 else -1), weight * (1 if size > 0 else -1), targets, torch.ones(3)
    results, expected = found(*inputs), exact(*inputs)
    assert all(x.isfinite().all() for x in results)
    check(results, expected, 1e-6, 2 * 2**-9 if dtype == torch.bfloat16 else 1e-6)
    assert float(results[1][0]) == 0 and abs(float(results[1][1]) / (2 * float(weight[7, 0])) - 1) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("chunk_elements", [2**27, 7 * VOCAB // 2])
def test_vocabulary_cut_over_two_ranks(ranks, dtype, chunk_elements):
    """Each rank has the whole loss, its rows' gradient, and its share of the gradient of hidden; targets lie on either side of the cut."""
    inputs = draw(dtype)
    expected = exact(*inputs)
    assert bool((inputs[2] < VOCAB // 2).any()) and bool((inputs[2] >= VOCAB // 2).any())
    answers = ranks.run(2, op_cells.cross_entropy_over_ranks, 2, *inputs, chunk_elements)
    whole = answers[0][0], answers[0][1], sum(x[2].double() for x in answers), torch.cat([x[3] for x in answers])
    check(whole, expected, 1e-12 if dtype == torch.float64 else 1e-6, 1e-12 if dtype == torch.float64 else 2 * 2**-9)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(answers[0][:2], answers[1][:2]))


def test_large_logits_cut_over_two_ranks(ranks):
    """The largest logit lies on one rank, the target on the other, 20,000 below."""
    hidden = torch.ones(2, 1)
    weight = torch.full((8, 1), -1e4)
    weight[6] = 1e4
    inputs = hidden, weight, torch.tensor([1, 6]), torch.ones(2)
    for _, losses, *gradients in ranks.run(2, op_cells.cross_entropy_over_ranks, 2, *inputs, 2**27):
        assert losses.tolist() == [20_000.0, 0.0]
        assert all(x.isfinite().all() for x in gradients)
