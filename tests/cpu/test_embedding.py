"""embed against torch's embedding in float64, and the module around it against megatron-core's, alone and over two ranks."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.ops.embedding import embed
from tests.cpu import cells, op_cells
from tests.cpu.tiny import VOCAB, tiny_words
from tests.definitions import relative_error

WORDS, WIDTH = 40, 12


def draw(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """tokens [25, 4], the weight of all words, the gradient of the output; some words are there many times, others not at all."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(WORDS, (25, 4), generator=random)
    tokens[torch.rand(25, 4, generator=random) < 0.4] = 7
    tokens[tokens == 11] = 12
    tokens[0] = torch.tensor([0, WORDS - 1, WORDS // 2 - 1, WORDS // 2])
    weight = torch.randn(WORDS, WIDTH, generator=random, dtype=torch.float64).to(dtype)
    return tokens, weight, torch.randn(25, 4, WIDTH, generator=random, dtype=torch.float64).to(dtype)


def exact(tokens: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Output and gradient of the whole weight in float64."""
    weight = weight.detach().double().clone().requires_grad_()
    out = F.embedding(tokens, weight)
    out.backward(grad.double())
    return out.detach(), weight.grad


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_rows_and_their_gradient(dtype, bound):
    """The output is exact; the gradient is summed in float32 or wider and rounded once."""
    tokens, weight, grad = draw(dtype)
    expected = exact(tokens, weight, grad)
    weight.requires_grad_()
    out = embed(tokens, weight, 0)
    out.backward(grad)
    assert out.dtype is weight.grad.dtype is dtype and torch.equal(out.double(), expected[0])
    assert relative_error(weight.grad, expected[1]) <= bound
    assert not weight.grad[11].any()
    if dtype is torch.bfloat16:
        assert torch.allclose(weight.grad.double(), expected[1], rtol=2**-8, atol=1e-6)


def test_rows_lie_as_the_tokens_are_read():
    """Transposed tokens give rows sequence first, without gaps."""
    tokens, weight, _ = draw(torch.float32)
    out = embed(tokens.T, weight, 0)
    assert out.is_contiguous() and torch.equal(out, weight[tokens.T])


@pytest.mark.parametrize("ranks", [2, 4])
def test_words_of_other_ranks(ranks):
    """Zeros, and no gradient: the sum over ranks is the whole output, each rank's gradient its rows of the whole."""
    tokens, weight, grad = draw(torch.float64)
    expected, total = exact(tokens, weight, grad), 0
    for first in range(0, WORDS, WORDS // ranks):
        here = slice(first, first + WORDS // ranks)
        rows = weight[here].clone().requires_grad_()
        out = embed(tokens, rows, first)
        assert not out[(tokens < here.start) | (tokens >= here.stop)].any()
        out.backward(grad)
        assert relative_error(rows.grad, expected[1][here]) <= 1e-12
        total = total + out.detach()
    assert torch.equal(total, expected[0])


@pytest.mark.parametrize("first", [0, WORDS // 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_added_to_the_weights_buffer(dtype, first):
    """In float32, to what is there. Without a buffer nothing changes."""
    tokens, whole, grad = draw(dtype)
    here = slice(first, first + WORDS // 2)
    expected, weight = exact(tokens, whole, grad)[1][here], whole[here].clone().requires_grad_()
    embed(tokens, weight, first).backward(grad)
    plain, weight.grad = weight.grad, None
    embed(tokens, weight, first, add_to_buffer=True).backward(grad)
    assert torch.equal(weight.grad, plain) and not hasattr(weight, "grad_added_to_main_grad")

    start = torch.randn(WORDS // 2, WIDTH, generator=torch.Generator().manual_seed(1))
    weight.main_grad, weight.grad_added_to_main_grad, weight.grad = start.clone(), False, None
    embed(tokens, weight, first).backward(grad)
    assert torch.equal(weight.grad, plain) and torch.equal(weight.main_grad, start) and not weight.grad_added_to_main_grad
    for _ in range(2):
        weight.grad = None  # not the gradient
        embed(tokens, weight, first, add_to_buffer=True).backward(grad)
    assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape and weight.grad.dtype is dtype
    assert relative_error(weight.main_grad, start.double() + 2 * expected) <= 1e-6
    untouched = expected.abs().amax(1) == 0
    assert untouched.any() and torch.equal(weight.main_grad[untouched], start[untouched])


def test_without_gradients():
    tokens, weight, _ = draw(torch.float32)
    weight.requires_grad_()
    with torch.no_grad():
        assert not embed(tokens, weight, 0, add_to_buffer=True).requires_grad
    assert not embed(tokens, weight.detach(), 0, add_to_buffer=True).requires_grad


@pytest.mark.parametrize("size, overrides", [(1, []), (2, []), (2, ["parallel.sequence=true"])])
def test_the_module_does_what_megatrons_does(ranks, tiny_data, size, overrides):
    """Output to the bit, gradient, and what a checkpoint and the optimizer know of the weight."""
    tokens = torch.randint(VOCAB, (3, 14), generator=torch.Generator().manual_seed(0))
    words = tiny_words(tiny_data, "run_dir=unused", f"parallel.tensor={size}", *overrides)
    for mine, theirs in ranks.run(size, op_cells.embedding_and_megatrons, words, tokens):
        assert torch.equal(mine[0], theirs[0]) and mine[0].shape[:2] == (14 // (size if overrides else 1), 3)
        assert mine[0].is_contiguous() and relative_error(mine[1], theirs[1]) <= 1e-6
        assert mine[2] == theirs[2] and mine[2]["tensor_model_parallel"]
        assert mine[3] == theirs[3] and [name for name, _, _ in mine[3]] == ["embedding.word_embeddings.weight"]


@pytest.mark.parametrize("layout", [[], ["parallel.tensor=2", "parallel.sequence=true"]])
def test_a_step_adds_to_the_buffer_what_a_dense_gradient_would(ranks, tiny_data, layout):
    """Over the micro-batches of a step, in bf16: the same but for the dense gradient's roundings, one for each."""
    words = tiny_words(tiny_data, "run_dir=unused", "train.precision=bf16", *layout)
    size, found = 2 if layout else 1, []
    for dense in (False, True):
        answers = ranks.run(size, op_cells.gradient_of_embedding, words, dense)
        found.append(cells.assemble(answers)["embedding.word_embeddings.weight"])
    assert 0 < relative_error(*found) <= 2**-8
