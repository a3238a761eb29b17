"""Rows of a weight by word number, the vocabulary split over tensor ranks.

The gradient of a word's row is the sum over the tokens that are this word, in the same order each time: on CUDA by a kernel over the sorted
tokens (ops/kernels/embedding.py). A weight that has a float32 gradient buffer, megatron-core's `main_grad`, has the sums added there: rows
of words that are not among the tokens are neither read nor written, and nothing is rounded on the way.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def embed(tokens: Tensor, weight: Tensor, first: int, add_to_buffer: bool = False) -> Tensor:
    """[..., h], contiguous, in the type of weight: the rows of tokens [...] int64, word numbers; zeros for words of other ranks.

    weight [words of this rank, h], `first` the number of this rank's first word. Its gradient is summed in float32 or wider.

    With `add_to_buffer` the gradient of a weight that has a `main_grad` [words of this rank, h] float32 is added to it, as megatron-core's
    linear layers do under gradient accumulation fusion, and the hooks of its DistributedDataParallel are told so.
    """
    return _Embed.apply(tokens, weight, first, add_to_buffer)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens: Tensor, weight: Tensor, first: int, add_to_buffer: bool) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.first, ctx.add_to_buffer = weight, first, add_to_buffer
        if weight.is_cuda:
            from hybrid_megatron.ops.kernels.embedding import rows_of

            return rows_of(tokens, weight, first)
        words, own = _of_this_rank(tokens, weight, first)
        return F.embedding(words.where(own, 0), weight).masked_fill_(~own[..., None], 0)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (tokens,), weight = ctx.saved_tensors, ctx.weight
        if ctx.add_to_buffer and hasattr(weight, "main_grad"):
            _add_rows_(weight.main_grad, tokens, grad, ctx.first)
            weight.grad_added_to_main_grad = True
            return None, torch.empty_like(weight), None, None  # DistributedDataParallel's hook wants a gradient, and drops it
        total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        _add_rows_(total, tokens, grad, ctx.first)
        return None, total.to(weight.dtype), None, None


def _add_rows_(total: Tensor, tokens: Tensor, rows: Tensor, first: int) -> None:
    """total[token - first] += row for each token of this rank and its row, in the type of total."""
    if total.is_cuda:
        from hybrid_megatron.ops.kernels.embedding import add_rows_

        add_rows_(total, tokens, rows, first)
    else:
        words, own = _of_this_rank(tokens, total, first)
        total.index_add_(0, words[own], rows[own].to(total.dtype))


def _of_this_rank(tokens: Tensor, weight: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """(rows of weight, where there is one)."""
    words = tokens - first
    return words, (words >= 0) & (words < weight.shape[0])
