"""Output projection and cross entropy in one, chunked over tokens and split over the vocabulary.

At 32K tokens and 128,256 words the logits would be the largest tensor by far; here only a chunk of them exists at a time. The gradient is
taken in the forward pass, chunk by chunk, while the probabilities are at hand, and scaled in the backward pass. That needs each token's
weight before its gradient is formed, but not before its loss is: weights may be a detached function of the losses, which a chunk knows
first.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_megatron.ops import cross_entropy
from hybrid_megatron.ops.matmul import add_matmul_, matmul

CHUNK_ELEMENTS = 3 * 2**26
"""Logits in memory at once: 768 MiB in float32, and half as much again for their gradient in bfloat16."""
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
) -> tuple[Tensor, Tensor]:
    """(sum over tokens of token_weight * cross entropy, per-token cross entropy in nats, detached).

    hidden [t, h]; weight [vocab / tp, h], this tensor rank's rows of the output layer; targets [t] word numbers; token_weights [t] float32.
    Losses are float32 (float64 if hidden is). The gradient of `hidden` is this rank's share: the caller has passed hidden through
    megatron-core's copy-to or gather-from region, whose backward pass sums it.

    With `weigh` the weights are weigh(token_weights, losses), an elementwise function whose first argument may then be anything that is
    known of each token beforehand.
    """
    if not torch.is_grad_enabled():  # inside the function below, inputs seem to need gradients all the same
        hidden, weight = hidden.detach(), weight.detach()
    return _LinearCrossEntropy.apply(hidden, weight, targets, token_weights, group, weigh)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, token_weights, group, weigh):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        first = weight.shape[0] * group.rank()
        losses = torch.empty(hidden.shape[0], dtype=wide, device=hidden.device)
        weights = token_weights if weigh is None else torch.empty_like(losses)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        size = chunk_tokens(weight.shape[0])
        for at in range(0, hidden.shape[0], size):
            here = slice(at, at + size)
            logits, words = matmul(hidden[here], weight.T, wide), targets[here] - first
            own = cross_entropy.row_sums(logits, words)
            joined = cross_entropy.over_ranks(own, group)
            losses[here] = joined.losses
            if weigh is not None:
                weights[here] = weigh(token_weights[here], losses[here])
            if grad_hidden is None and grad_weight is None:
                continue
            grad = cross_entropy.gradient(logits, words, own, joined, weights[here], hidden.dtype)
            del logits  # in the type of the gradient, or gone before the next ones come
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[here])
            if grad_weight is not None:
                add_matmul_(grad_weight, grad.T, hidden[here])
            del grad
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    def backward(ctx, grad_sum, _):
        grad_hidden, grad_weight = ctx.saved_tensors
        scaled = [None if grad is None else grad * grad_sum.to(grad.dtype) for grad in (grad_hidden, grad_weight)]
        return *scaled, None, None, None, None
