"""`embed` on CUDA by its kernels, against float64: at the real vocabulary, with frequent words, and with words of other ranks.

Rows are copied, so the output is exact. Their gradient is a sum in float32: bound 1e-6 relative norm in the buffer, and one rounding to
bf16, 2^-8 at most, without one.
"""

import pytest
import torch

from hybrid_megatron.ops.embedding import embed
from tests.definitions import relative_error

VOCAB = 128_256


def zipf(tokens: int, words: int) -> torch.Tensor:
    """[tokens]: word k in about 1 / k of them, so that some are there thousands of times and most never."""
    return torch.multinomial(1 / torch.arange(1.0, words + 1, device="cuda"), tokens, replacement=True)


def one_word(tokens: int, words: int) -> torch.Tensor:
    """[tokens]: two thirds of them one word."""
    return zipf(tokens, words).where(torch.rand(tokens, device="cuda") < 1 / 3, words // 2)


# tokens, words of all ranks, width, this rank's words, how they are drawn
CASES = {
    "a step of 776m": (32_768, VOCAB, 1536, slice(0, VOCAB), zipf),
    "the first of two ranks": (32_768, VOCAB, 1536, slice(0, VOCAB // 2), zipf),
    "the last of four ranks": (32_768, VOCAB, 1536, slice(3 * VOCAB // 4, VOCAB), zipf),
    "one word": (32_768, 1000, 1536, slice(0, 1000), one_word),
    "one word, of another rank": (8192, 1000, 512, slice(0, 500), one_word),
    "nothing but one word": (8192, 1, 512, slice(0, 1), zipf),
    "odd sizes": (1001, 77, 83, slice(11, 55), zipf),
    "one token": (1, 5, 64, slice(0, 5), zipf),
}


def draw(case: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """tokens [t, 1], this rank's weight, the gradient of the output, this rank's first word."""
    torch.manual_seed(0)
    tokens, words, width, here, drawn = CASES[case]
    weight = torch.randn(here.stop - here.start, width, device="cuda").to(dtype)
    return drawn(tokens, words)[:, None], weight, torch.randn(tokens, 1, width, device="cuda").to(dtype), here.start


def exact(tokens: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and gradient in float64."""
    words = tokens.flatten() - first
    own = (words >= 0) & (words < len(weight))
    out = torch.zeros(grad.shape, dtype=torch.float64, device="cuda")
    out[own] = weight[words[own]].double()[:, None]
    total = torch.zeros(weight.shape, dtype=torch.float64, device="cuda")
    return out, total.index_add_(0, words[own], grad[own, 0].double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_rows_and_their_gradient(case, dtype):
    tokens, weight, grad, first = draw(case, dtype)
    out, of_weight = exact(tokens, weight, grad, first)
    weight.requires_grad_()
    found = embed(tokens, weight, first)
    assert found.dtype is dtype and torch.equal(found.double(), out)
    found.backward(grad)
    assert weight.grad.dtype is dtype
    assert relative_error(weight.grad, of_weight) <= (2**-8 if dtype is torch.bfloat16 else 1e-6)
    assert torch.equal(weight.grad, torch.autograd.grad(embed(tokens, weight, first), weight, grad)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_added_to_the_weights_buffer(case, dtype):
    """In float32, to what is there, and the same to the bit each time."""
    tokens, weight, grad, first = draw(case, dtype)
    of_weight = exact(tokens, weight, grad, first)[1]
    weight.requires_grad_()
    start, totals = torch.randn(weight.shape, device="cuda"), []
    for _ in range(2):
        weight.main_grad, weight.grad_added_to_main_grad, weight.grad = start.clone(), False, None
        embed(tokens, weight, first, add_to_buffer=True).backward(grad)
        assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape
        totals.append(weight.main_grad)
    touched = torch.zeros(len(weight) + 1, dtype=torch.bool, device="cuda")
    touched[(tokens - first).where((tokens >= first) & (tokens < first + len(weight)), len(weight))] = True
    touched = touched[:-1]
    assert torch.equal(totals[0], totals[1]) and torch.equal(totals[0][~touched], start[~touched])
    assert relative_error(totals[0][touched], start[touched].double() + of_weight[touched]) <= 1e-6


def test_float64():
    tokens, weight, grad, first = draw("odd sizes", torch.float64)
    out, of_weight = exact(tokens, weight, grad, first)
    weight.requires_grad_()
    found = embed(tokens, weight, first)
    found.backward(grad)
    assert torch.equal(found, out) and relative_error(weight.grad, of_weight) <= 1e-13


def test_rows_lie_as_the_tokens_are_read():
    """Transposed tokens give rows sequence first, without gaps, and gradients come back to the right words."""
    torch.manual_seed(0)
    tokens, weight = torch.randint(500, (4, 96), device="cuda"), torch.randn(500, 64, device="cuda", requires_grad=True)
    grad = torch.randn(96, 4, 64, device="cuda")
    out = embed(tokens.T, weight, 0)
    out.backward(grad)
    expected = torch.zeros(500, 64, dtype=torch.float64, device="cuda").index_add_(0, tokens.T.flatten(), grad.flatten(0, 1).double())
    assert out.is_contiguous() and torch.equal(out, weight[tokens.T]) and relative_error(weight.grad, expected) <= 1e-6


def test_there_is_no_dense_gradient_in_float32():
    """With a buffer there is what stands for the gradient, in bf16, and before it sums of parts of frequent words: 6 MiB."""
    tokens, weight, grad, first = draw("a step of 776m", torch.bfloat16)
    weight.requires_grad_()
    weight.main_grad = torch.zeros(weight.shape, device="cuda")
    out = embed(tokens, weight, first, add_to_buffer=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out.backward(grad)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 2 * weight.numel() + 2**25, peak / 2**20
