"""Softmax cross entropy of rows of logits in two passes: sums over each row, then its gradient. Between them tensor ranks join theirs.

On CUDA in float32 each pass is one Triton kernel (kernels/cross_entropy.py) that reads the logits once; elsewhere the same in torch.
Targets number the words from the first one of these rows; one outside of them is another rank's, and belongs to no column here.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class RowSums(NamedTuple):
    """Of logits [t, words], each [t] in the logits' dtype."""

    highest: Tensor
    """Largest logit."""
    total: Tensor
    """Sum of e^(logit - highest)."""
    chosen: Tensor
    """The target's logit; 0 where it is another rank's."""

    @property
    def losses(self) -> Tensor:
        """Cross entropy in nats."""
        return self.total.log() - (self.chosen - self.highest)


def row_sums(logits: Tensor, targets: Tensor) -> RowSums:
    """logits [t, words], targets [t]. What is left in `logits` is for `gradient`: the logits on CUDA, elsewhere e^(logit - highest)."""
    if _by_kernel(logits):
        from hybrid_megatron.ops.kernels import cross_entropy as kernels

        return RowSums(*kernels.row_sums(logits, targets))
    highest, (mine, word) = logits.amax(dim=-1), _here(targets, logits.shape[1])
    chosen = logits.gather(1, word[:, None])[:, 0] * mine
    return RowSums(highest, logits.sub_(highest[:, None]).exp_().sum(dim=-1), chosen)


def over_ranks(sums: RowSums, group: ProcessGroup) -> RowSums:
    """Of the rows whose words are cut over the ranks of a group."""
    if group.size() == 1:
        return sums
    highest = sums.highest.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    added = torch.stack((sums.total * (sums.highest - highest).exp(), sums.chosen))
    dist.all_reduce(added, group=group)
    return RowSums(highest, *added)


def gradient(logits: Tensor, targets: Tensor, own: RowSums, joined: RowSums, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """weight * (softmax - one-hot) [t, words] in `dtype`, over the logits if that is their type or on CUDA; weights [t].

    `logits` as `row_sums` left them when it returned `own`; `joined` is that over all ranks. On CUDA each row of the gradient begins where
    the row of logits did: in bfloat16 there is a gap as long as a row between two of them, which matrix products take as it is.
    """
    if _by_kernel(logits):
        from hybrid_megatron.ops.kernels import cross_entropy as kernels

        return kernels.gradient(logits, targets, joined.highest, joined.total, weights, dtype)
    logits *= ((own.highest - joined.highest).exp() / joined.total)[:, None]
    mine, word = _here(targets, logits.shape[1])
    logits[torch.arange(len(logits), device=logits.device), word] -= mine.to(logits.dtype)
    return logits.mul_(weights[:, None]).to(dtype)


def _here(targets: Tensor, words: int) -> tuple[Tensor, Tensor]:
    """Whether the target is among these words, and a word that is in any case."""
    return (targets >= 0) & (targets < words), targets.clamp(0, words - 1)


def _by_kernel(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype is torch.float32
