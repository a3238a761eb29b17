"""`linear_cross_entropy` on CUDA, bf16, at the real vocabulary, against torch's cross entropy in float64; and its memory.

Logits of bf16 inputs are summed in float32, so a token's loss is near float32-exact: bound 1e-5 nats. The gradient of the logits is
rounded to bf16 once before both products and the results once more, 2^-9 each at most: bound 5e-3 relative norm.
"""

import torch
import torch.nn.functional as F

from hybrid_megatron.ops import linear_cross_entropy as module
from hybrid_megatron.ops.linear_cross_entropy import linear_cross_entropy
from tests.definitions import relative_error

VOCAB = 128_256


class Alone:
    """A process group of one."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def draw(tokens: int, width: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device="cuda").bfloat16()
    weight = (torch.randn(VOCAB, width, device="cuda") * 0.1).bfloat16()
    targets = torch.randint(0, VOCAB, (tokens,), device="cuda")
    targets[:2] = torch.tensor([0, VOCAB - 1])
    weights = torch.rand(tokens, device="cuda") * 2
    weights[5:8] = 0
    return hidden, weight, targets, weights


def test_losses_and_gradients():
    """More tokens than one chunk of logits holds."""
    hidden, weight, targets, weights = draw(7000, 256)
    assert len(hidden) * VOCAB > 2 * module.CHUNK_ELEMENTS
    fast_hidden, fast_weight = (x.clone().requires_grad_() for x in (hidden, weight))
    total, losses = linear_cross_entropy(fast_hidden, fast_weight, targets, weights, Alone())
    (3 * total).backward()

    exact_hidden, exact_weight = (x.double().requires_grad_() for x in (hidden, weight))
    exact_losses = F.cross_entropy(exact_hidden @ exact_weight.T, targets, reduction="none")
    exact_total = (exact_losses * weights).sum()
    (3 * exact_total).backward()

    assert losses.dtype == torch.float32 and float((losses - exact_losses).abs().max()) <= 1e-5
    assert abs(float(total) / float(exact_total) - 1) <= 1e-6
    for fast, exact in ((fast_hidden, exact_hidden), (fast_weight, exact_weight)):
        assert fast.grad.dtype == torch.bfloat16
        assert relative_error(fast.grad, exact.grad) <= 5e-3
    assert torch.equal(fast_hidden.grad[5:8], torch.zeros_like(fast_hidden.grad[5:8]))


def test_the_gradient_is_added_to_the_weights_buffer():
    """In float32, to what is there: only the gradient of the logits is rounded to bf16, 2^-8 at most."""
    hidden, weight, targets, weights = draw(4000, 256)
    assert len(hidden) * VOCAB > module.CHUNK_ELEMENTS
    exact_hidden, exact_weight = hidden.double(), weight.double().requires_grad_()
    (F.cross_entropy(exact_hidden @ exact_weight.T, targets, reduction="none") * weights).sum().backward()

    hidden.requires_grad_(), weight.requires_grad_()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape, device="cuda"), False
    for scale in (3, 1 / 3):
        linear_cross_entropy(hidden, weight, targets, weights * scale, Alone(), add_to_buffer=True)[0].backward()
        weight.grad = None  # not the gradient
    assert weight.grad_added_to_main_grad
    assert relative_error(weight.main_grad, exact_weight.grad * (3 + 1 / 3)) <= 2**-8
    assert bool((weight.main_grad != weight.main_grad.bfloat16().float()).any())


def test_memory_is_far_below_the_whole_logits():
    """16,384 tokens: the logits in float32 would be 7.8 GiB, and torch's way holds them and their gradient.

    A chunk of logits in float32, whose place their gradient takes: the products do not copy it, and add to the weight's buffer.
    """
    hidden, weight, targets, weights = draw(16_384, 512)
    hidden.requires_grad_(), weight.requires_grad_()
    weight.main_grad = torch.zeros(weight.shape, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, targets, weights, Alone(), add_to_buffer=True)[0].backward()
    peak = torch.cuda.max_memory_allocated() - before
    print(f"peak {peak / 2**30:.2f} GiB")
    assert peak < 4 * len(hidden) * VOCAB / 4
    assert peak < 1.1 * 4 * module.chunk_tokens(VOCAB) * VOCAB  # cuBLAS's workspace among the rest
