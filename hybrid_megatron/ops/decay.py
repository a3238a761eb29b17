"""Recurrences that decay and add: S_t = e^{g_t} S_{t-1} + k_t^T v_t, o_t = scale * q_t S_t, per head, with log decays g_t <= 0.

What gated linear attention (g_t a vector over the rows of S), its form with one gate a head and linear attention with a fixed decay (a
number a head) share. The delta rules with a gate of each row take their decays between tokens from here too.
"""

import torch
from torch import Tensor


def recurrent(q, k, v, g, *, scale: float, initial_state=None, document_starts=None) -> tuple[Tensor, Tensor]:
    """(o, final state) by the definition; q, k [b, s, n, K], v [b, s, n, V], g [b, s, n, K or 1]."""
    batch, length, heads, width_k = k.shape
    state = initial_state if initial_state is not None else k.new_zeros(batch, heads, width_k, v.shape[-1])
    outputs = []
    for t in range(length):
        if document_starts is not None:
            state = state.masked_fill(document_starts[:, t, None, None, None], 0.0)
        state = state * g[:, t, :, :, None].exp() + torch.einsum("bnk,bnv->bnkv", k[:, t], v[:, t])
        outputs.append(scale * torch.einsum("bnk,bnkv->bnv", q[:, t], state))
    return torch.stack(outputs, dim=1), state


def between_tokens(g: Tensor, seen: Tensor) -> Tensor:
    """[b, n, count, chunk, chunk + 1, W]: at [t, j + 1] the product of the decays after token j up to token t of a chunk, and at [t, 0] of
    all up to t; zero where t does not see j. g [b, n, count, chunk, W] are log decays, `seen` as `chunks.visible` makes it.

    Each pair of tokens has its own sum of gates. Neither a difference of sums nor a quotient of products is taken, so that strong gates
    cost weak ones no digits, and nothing overflows.
    """
    chunk = g.shape[-2]
    place = torch.arange(chunk, device=g.device)
    begin = torch.arange(chunk + 1, device=g.device)[:, None]
    spans = (begin <= place) & (place <= place[:, None, None])  # [t, j + 1, l]: whether token l is one of j + 1 .. t
    sums = (spans.flatten(0, 1).to(g.dtype) @ g).unflatten(-2, (chunk, chunk + 1))
    return sums.masked_fill(~seen[..., None], float("-inf")).exp()


def through_chunks(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, decay: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """(o [b, n, count, chunk, V], final state) of chunks: between them, only the state passes.

    q (times scale), k, v [b, n, count, chunk, ...]; scores [.., chunk, chunk], what a chunk's tokens see of each other; decay
    [b or 1, n, count, chunk, chunk + 1, K or 1], at [t, j + 1] the product of the decays after token j up to token t, and at [t, 0] of all
    up to t; zero where t does not see j.
    """
    from_start, to_end, keep = decay[..., 0, :], decay[..., -1, 1:, :], decay[..., -1, 0, :, None]
    added = (k * to_end).mT @ v
    state = torch.zeros_like(added[:, :, 0]) if initial_state is None else initial_state.to(added.dtype)
    states = []
    for c in range(k.shape[2]):
        states.append(state)
        state = keep[:, :, c] * state + added[:, :, c]
    return (q * from_start) @ torch.stack(states, dim=2) + scores @ v, state


def decayed_sum(k: Tensor, v: Tensor, after: Tensor, document_starts: Tensor | None) -> Tensor:
    """What tokens add to the state in all, sum_j (k_j e^{after_j})^T v_j [b, n, K, V], in the dtype of `after`: one product of matrices.

    after [b or 1, s, n, K or 1] is the sum of the log decays of the tokens after j, so no exponent is above zero. Tokens before a later
    document start add nothing.
    """
    weight = after.exp()
    if document_starts is not None:
        later = document_starts.long().flip(1).cumsum(1).flip(1) - document_starts.long()
        weight = weight * (later == 0)[..., None, None]
    return torch.einsum("bsnk,bsnv->bnkv", k * weight, v.to(weight.dtype))


def cut_by_documents(transition: Tensor, document_starts: Tensor | None) -> Tensor:
    """A span's transition [b, n, ...], zero in the rows in which a document starts."""
    return transition if document_starts is None else transition.masked_fill(document_starts.any(1)[:, None, None, None], 0.0)
