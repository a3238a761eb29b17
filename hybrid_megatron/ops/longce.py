"""LongCE (Fang et al., 2025, arXiv 2410.23771): which tokens have a short context, and what a token then weighs in the loss.

A sample has L input tokens; the label of position t is token t + 1. With a window of K tokens and a stride of d, window i = 1, 2, ... holds
the inputs [i d, i d + K + d) and scores its last d positions, [i d + K, i d + K + d): each of them is predicted from K + 1 to K + d tokens
instead of all t + 1. Positions [0, K + d) have no shorter context than their own, and weigh exactly 1 (the window at 0 would be their own
context). Every other position weighs

    w_t = min(exp(short_t - loss_t), gamma),

short_t and loss_t being its cross entropy in nats with the short context and with the whole. A token that long context helps weighs more
than 1, one that it harms less: there is no lower clamp. The weights are detached, and the loss of a batch is sum_t w_t loss_t over the
number of its tokens, not over the sum of the weights.

The published code scores the window's inputs shifted by one: a context of K to K + d - 1 tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Windows:
    """The short contexts of a sample of `context` tokens; context - window is a multiple of stride."""

    context: int
    window: int
    """K."""
    stride: int
    """d."""

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return self.window + self.stride

    @property
    def count(self) -> int:
        """Windows of a sample."""
        return (self.context - self.length) // self.stride

    def cut(self, samples: Tensor) -> Tensor:
        """[b, context] -> [b * count, length]: the windows of the first sample in order, then those of the next."""
        return samples.unfold(1, self.length, self.stride)[:, 1:].flatten(0, 1)

    def cut_documents(self, starts: Tensor | None) -> Tensor | None:
        """The same of document starts. In a window that begins within a document, that document begins with the window."""
        if starts is None:
            return None
        cut = self.cut(starts).clone()
        cut[:, 0] = True
        return cut

    def join(self, scored: Tensor) -> Tensor:
        """[b * count, stride], the losses of the scored positions of all windows, -> [b, context], infinite where there is no window."""
        ends = scored.reshape(-1, self.count * self.stride)
        return torch.nn.functional.pad(ends, (self.length, 0), value=torch.inf)


def longce_weights(short_losses: Tensor, losses: Tensor, gamma: float) -> Tensor:
    """Weights of tokens, elementwise. `short_losses` is infinite where a token has no shorter context than its own: weight 1.

    A loss that is not a number gives a weight that is not a number.
    """
    return torch.where(short_losses == torch.inf, 1.0, torch.exp(short_losses - losses).clamp(max=gamma))
