"""The generalized delta rule, the recurrence of RWKV-7 (Peng et al., 2025, arXiv 2503.14456): a transition that is diagonal plus rank one.

    S_t = (Diag(e^{g_t}) + b_t^T a_t) S_{t-1} + k_t^T v_t        o_t = scale * q_t S_t

per head, with row vectors q_t, k_t, a_t, b_t [K], v_t [V], log gates g_t [K], finite and <= 0, state S [K, V]. What is removed is read from
the state before it decays. RWKV-7 calls q r, g w, and has a = -kk, b = kk * rate for a unit vector kk and a rate in (0, 1).
"""

import math

import torch
from torch import Tensor

from hybrid_megatron.ops import decay
from hybrid_megatron.ops.chunks import cut, join, visible
from hybrid_megatron.ops.documents import over_documents
from hybrid_megatron.ops.recurrence import MatrixTransition
from hybrid_megatron.ops.triangular import inverse_unit_lower

CHUNK = 16
STRONGEST_GATE = -math.exp(-0.5)
"""RWKV-7's log gates lie between it and zero."""


class GeneralizedDeltaRule(MatrixTransition):
    """Inputs q, k [b, s, n, K], v [b, s, n, V], g [b, s, n, K] float32, a, b [b, s, n, K]; transitions [b, n, K, K].

    On CUDA no gate may be below STRONGEST_GATE: the kernels divide by the decay of half a chunk of 64 tokens, at most e^20 then, and so run
    on tensor cores. a and b have the dtype of q.
    """

    input_names = ("q", "k", "v", "g", "a", "b")

    def run(self, inputs, *, scale, initial_state=None, document_starts=None):
        if not inputs[0].is_cuda:
            return chunked(*inputs, scale=scale, initial_state=initial_state, document_starts=document_starts)
        from fla.ops.rwkv7 import chunk_rwkv7

        def kernel(q, k, v, g, a, b, **more):
            return chunk_rwkv7(q, g, k, v, a, b, scale=scale, output_final_state=True, lower_bound=STRONGEST_GATE, **more)

        return over_documents(kernel, inputs, initial_state, document_starts)

    def recurrent(self, inputs, *, scale, initial_state=None, document_starts=None):
        return recurrent(*inputs, scale=scale, initial_state=initial_state, document_starts=document_starts)


def recurrent(q, k, v, g, a, b, *, scale: float, initial_state=None, document_starts=None) -> tuple[Tensor, Tensor]:
    """(o, final state) by the definition, one token after the other; differentiable, in the dtype given (float64 in tests)."""
    batch, length, heads, width_k = k.shape
    state = initial_state if initial_state is not None else k.new_zeros(batch, heads, width_k, v.shape[-1])
    outputs = []
    for t in range(length):
        if document_starts is not None:
            state = state.masked_fill(document_starts[:, t, None, None, None], 0.0)
        read = torch.einsum("bnk,bnkv->bnv", a[:, t], state)
        state = state * g[:, t, :, :, None].exp()
        state = state + torch.einsum("bnk,bnv->bnkv", b[:, t], read) + torch.einsum("bnk,bnv->bnkv", k[:, t], v[:, t])
        outputs.append(scale * torch.einsum("bnk,bnkv->bnv", q[:, t], state))
    return torch.stack(outputs, dim=1), state


def chunked(q, k, v, g, a, b, *, scale: float, initial_state=None, document_starts=None) -> tuple[Tensor, Tensor]:
    """(o, final state) in chunks of 16 tokens, for the CPU; float32 for lower precisions, the given dtype otherwise.

    With D_tj [K] the decays of the tokens after j up to t, D_t those of all up to t, E_tj and E_t the same up to t - 1, S the state at the
    chunk's start and A^{xy}_tj = sum_c x_tc D_tjc y_jc (E for x = a), what the tokens read obeys
    (I - A^{ab}) U = (a E) S + A^{ak} V, and then o = scale ((q D) S + A^{qk} V + A^{qb} U) and
    S' = Diag(D_C) S + sum_j Diag(D_Cj) (k_j^T v_j + b_j^T u_j). Each pair of tokens has its own sum of gates, so every exponent is <= 0 and
    strong gates cost weak ones no digits. A document start cuts all terms that reach across it.
    """
    work = torch.promote_types(q.dtype, torch.float32)
    length, out_dtype = q.shape[1], v.dtype
    # Padding has zero gates, keys, a and b, so it leaves the state as it is.
    q, k, v, g, a, b = (cut(x, CHUNK, work) for x in (q, k, v, g, a, b))
    q = q * scale
    seen = visible(document_starts, CHUNK, q.device)
    decays = decay.between_tokens(g, seen)
    before = _until_the_token_before(decays, seen)

    def scores(x: Tensor, y: Tensor, decays: Tensor) -> Tensor:
        return (x[..., :, None, :] * decays[..., 1:, :] * y[..., None, :, :]).sum(-1)

    solve = inverse_unit_lower(-scores(a, b, before))
    read_alone = solve @ (scores(a, k, before) @ v)
    read_per_state = solve @ (a * before[..., 0, :])
    q_start, to_end, keep = q * decays[..., 0, :], decays[..., -1, 1:, :], decays[..., -1, 0, :, None]
    added, b_end = (k * to_end).mT @ v, (b * to_end).mT
    seen_alone, scores_b = scores(q, k, decays) @ v, scores(q, b, decays)

    state = initial_state.to(work) if initial_state is not None else k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for c in range(k.shape[2]):
        read = read_alone[:, :, c] + read_per_state[:, :, c] @ state
        outputs.append(q_start[:, :, c] @ state + seen_alone[:, :, c] + scores_b[:, :, c] @ read)
        state = keep[:, :, c] * state + added[:, :, c] + b_end[:, :, c] @ read
    return join(torch.stack(outputs, dim=2), length).to(out_dtype), state


def _until_the_token_before(decays: Tensor, seen: Tensor) -> Tensor:
    """As `decays`, at [t, j + 1] the product after token j up to t - 1, at [t, 0] of all up to there; zero where t does not see j < t."""
    above = torch.cat((torch.ones_like(decays[..., :1, :, :]), decays[..., :-1, :, :]), dim=-3)
    return above.masked_fill(~seen.tril()[..., None], 0.0)
