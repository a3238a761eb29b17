"""Output projection and cross entropy in one, chunked over tokens and split over the vocabulary.

At 32K tokens and 128,256 words the logits would be the largest tensor by far; here only a chunk of them exists at a time. The gradient is
taken in the forward pass, chunk by chunk, while the probabilities are at hand, and scaled in the backward pass. That needs each token's
weight before its gradient is formed, but not before its loss is: weights may be a detached function of the losses, which a chunk knows
first.

A weight that has a float32 gradient buffer, megatron-core's `main_grad`, has its gradient added there by the product that makes it, without
a rounding on the way. That happens in the forward pass too, so the loss is then differentiated as it is.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_megatron.ops import cross_entropy
from hybrid_megatron.ops.matmul import add_matmul_, matmul

CHUNK_ELEMENTS = 3 * 2**27
"""Logits in memory at once: 1.5 GiB in float32, and on CUDA their gradient takes their place."""
_ROUND = 128  # tokens of a chunk are a multiple of it, where there are so many: whole tiles for the products


def chunk_tokens(words: int) -> int:
    """Tokens of a chunk of logits over so many words, if there are as many."""
    tokens = max(1, CHUNK_ELEMENTS // words)
    return tokens - tokens % _ROUND if tokens > _ROUND else tokens


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor,
    group: ProcessGroup,
    weigh: Callable[[Tensor, Tensor], Tensor] | None = None,
    add_to_buffer: bool = False,
) -> tuple[Tensor, Tensor]:
    """(sum over tokens of token_weight * cross entropy, per-token cross entropy in nats, detached).

    hidden [t, h]; weight [vocab / tp, h], this tensor rank's rows of the output layer; targets [t] word numbers; token_weights [t] float32.
    Losses are float32 (float64 if hidden is). The gradient of `hidden` is this rank's share: the caller has passed hidden through
    megatron-core's copy-to or gather-from region, whose backward pass sums it.

    With `weigh` the weights are weigh(token_weights, losses), an elementwise function whose first argument may then be anything that is
    known of each token beforehand.

    With `add_to_buffer` the gradient of a weight that has a `main_grad` [vocab / tp, h] float32 is added to it, as megatron-core's linear
    layers do under gradient accumulation fusion, and the hooks of its DistributedDataParallel are told so. The sum must then be
    differentiated once and as it is: raises RuntimeError in the backward pass, on CUDA as an assertion of the device's, where the gradient
    of the sum is not 1. Token weights have the factors of a mean in them.
    """
    if not torch.is_grad_enabled():  # inside the function below, inputs seem to need gradients all the same
        hidden, weight = hidden.detach(), weight.detach()
    return _LinearCrossEntropy.apply(hidden, weight, targets, token_weights, group, weigh, add_to_buffer)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, token_weights, group, weigh, add_to_buffer):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        first = weight.shape[0] * group.rank()
        losses = torch.empty(hidden.shape[0], dtype=wide, device=hidden.device)
        weights = token_weights if weigh is None else torch.empty_like(losses)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        buffer = weight.main_grad if add_to_buffer and ctx.needs_input_grad[1] and hasattr(weight, "main_grad") else None
        grad_weight = None
        size = chunk_tokens(weight.shape[0])
        for at in range(0, hidden.shape[0], size):
            here = slice(at, at + size)
            logits, words = matmul(hidden[here], weight.T, wide), targets[here] - first
            own = cross_entropy.row_sums(logits, words)
            joined = cross_entropy.over_ranks(own, group)
            losses[here] = joined.losses
            if weigh is not None:
                weights[here] = weigh(token_weights[here], losses[here])
            grad = None
            if any(ctx.needs_input_grad[:2]):
                grad = cross_entropy.gradient(logits, words, own, joined, weights[here], hidden.dtype)
            del logits  # now the gradient, or not needed any more
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[here])
            if ctx.needs_input_grad[1]:
                if buffer is not None:
                    add_matmul_(buffer, grad.T, hidden[here])
                elif grad_weight is None:
                    grad_weight = matmul(grad.T, hidden[here], wide)
                else:
                    add_matmul_(grad_weight, grad.T, hidden[here])
            del grad  # gone before the next logits come
        ctx.buffered = weight if buffer is not None else None
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    def backward(ctx, grad_sum, _):
        grad_hidden, grad_weight = ctx.saved_tensors
        if ctx.buffered is None:
            return _scaled(grad_hidden, grad_sum), _scaled(grad_weight, grad_sum), None, None, None, None, None
        torch._assert_async(grad_sum == 1, "the gradient in the buffer is that of the sum as it is")
        ctx.buffered.grad_added_to_main_grad = True
        # DistributedDataParallel's hook wants a gradient of the weight, and drops it.
        return grad_hidden, torch.empty_like(ctx.buffered), None, None, None, None, None


def _scaled(gradient: Tensor | None, scale: Tensor) -> Tensor | None:
    """By a scalar that is not rounded to the gradient's type first, as it would be without a dimension."""
    return None if gradient is None else torch.mul(gradient, scale.view(1), out=torch.empty_like(gradient))
