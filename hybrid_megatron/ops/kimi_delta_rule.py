"""The delta rule with a forget gate of each channel, the recurrence of Kimi Delta Attention (Kimi Team, 2025, arXiv 2510.26692):

    S_t = (I - beta_t k_t^T k_t) Diag(e^{g_t}) S_{t-1} + beta_t k_t^T v_t        o_t = scale * q_t S_t

per head, with row vectors q_t, k_t [K], v_t [V], log gates g_t [K], finite and <= 0, beta_t in (0, 2), state S [K, V]. With one gate for
all channels it is the gated delta rule.

Shapes: q, k [b, s, n, K]; v [b, s, n, V]; g [b, s, n, K]; beta [b, s, n]; initial_state [b, n, K, V]; document_starts [b, s] bool or None.
"""

from functools import partial

import torch
from torch import Tensor

from hybrid_megatron.ops import decay
from hybrid_megatron.ops.chunks import cut, join, visible
from hybrid_megatron.ops.documents import over_documents
from hybrid_megatron.ops.recurrence import MatrixTransition
from hybrid_megatron.ops.triangular import inverse_unit_lower

CHUNK = 16


class KimiDeltaRule(MatrixTransition):
    """Inputs q, k [b, s, n, K], v [b, s, n, V], g [b, s, n, K], beta [b, s, n] float32; transitions [b, n, K, K]."""

    input_names = ("q", "k", "v", "g", "beta")
    states_by_kernels = True

    def run(self, inputs, *, scale, initial_state=None, document_starts=None):
        if not inputs[0].is_cuda:
            return chunked(*inputs, scale=scale, initial_state=initial_state, document_starts=document_starts)
        from fla.ops.kda import chunk_kda

        return over_documents(partial(chunk_kda, scale=scale, output_final_state=True), inputs, initial_state, document_starts)

    def recurrent(self, inputs, *, scale, initial_state=None, document_starts=None):
        return recurrent(*inputs, scale=scale, initial_state=initial_state, document_starts=document_starts)

    @torch.no_grad()
    def summary(self, inputs, document_starts=None):
        if not inputs[0].is_cuda:
            return super().summary(inputs, document_starts)
        from hybrid_megatron.ops import state_kernels

        transition, added = state_kernels.kimi_delta_summary(*inputs, document_starts)
        return decay.cut_by_documents(transition, document_starts), added

    def initial_state_gradient(self, inputs, grad, *, scale, document_starts=None):
        if not grad.is_cuda:
            return super().initial_state_gradient(inputs, grad, scale=scale, document_starts=document_starts)
        from hybrid_megatron.ops import state_kernels

        return state_kernels.gradient_under_kimi_delta(*inputs, grad, scale, document_starts)


def recurrent(q, k, v, g, beta, *, scale: float, initial_state=None, document_starts=None) -> tuple[Tensor, Tensor]:
    """(o, final state) by the definition, one token after the other; differentiable, in the dtype given (float64 in tests)."""
    batch, length, heads, width_k = k.shape
    state = initial_state if initial_state is not None else k.new_zeros(batch, heads, width_k, v.shape[-1])
    outputs = []
    for t in range(length):
        if document_starts is not None:
            state = state.masked_fill(document_starts[:, t, None, None, None], 0.0)
        state = state * g[:, t, :, :, None].exp()
        error = v[:, t] - torch.einsum("bnk,bnkv->bnv", k[:, t], state)
        state = state + torch.einsum("bnk,bnv->bnkv", k[:, t], beta[:, t, :, None] * error)
        outputs.append(scale * torch.einsum("bnk,bnkv->bnv", q[:, t], state))
    return torch.stack(outputs, dim=1), state


def chunked(q, k, v, g, beta, *, scale: float, initial_state=None, document_starts=None) -> tuple[Tensor, Tensor]:
    """(o, final state) in chunks of 16 tokens, for the CPU; float32 for lower precisions, the given dtype otherwise.

    With D_tj [K] the decays of the tokens after j up to t and D_t those of all up to t, S the state at the chunk's start and
    A_tj = sum_c x_tc D_tjc k_jc for x = k or q, the updates u_t obey (I + tril(beta_t A^k_tj, -1)) U = beta (V - (K D) S), and then
    o = scale ((Q D) S + tril(A^q) U) and S' = Diag(D_C) S + sum_j (k_j D_Cj)^T u_j. A document start cuts all terms that reach across it.
    """
    work = torch.promote_types(q.dtype, torch.float32)
    length, out_dtype = q.shape[1], v.dtype
    # Padding has zero beta and gates, so it leaves the state as it is.
    q, k, v, g, beta = cut(q, CHUNK, work) * scale, *(cut(x, CHUNK, work) for x in (k, v, g)), cut(beta, CHUNK, work)[..., None]
    decays = decay.between_tokens(g, visible(document_starts, CHUNK, q.device))
    from_start, to_end, keep = decays[..., 0, :], decays[..., -1, 1:, :], decays[..., -1, 0, :, None]

    keys = decays[..., 1:, :] * k[..., None, :, :]  # [.., t, j, K]: key j as token t finds it
    scores = (q[..., :, None, :] * keys).sum(-1)
    solve = inverse_unit_lower(beta * (k[..., :, None, :] * keys).sum(-1))
    update_alone = solve @ (beta * v)
    update_per_state = solve @ (beta * from_start * k)
    q_start, k_end = q * from_start, k * to_end

    state = initial_state.to(work) if initial_state is not None else k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for c in range(k.shape[2]):
        update = update_alone[:, :, c] - update_per_state[:, :, c] @ state
        outputs.append(q_start[:, :, c] @ state + scores[:, :, c] @ update)
        state = keep[:, :, c] * state + k_end[:, :, c].mT @ update
    return join(torch.stack(outputs, dim=2), length).to(out_dtype), state
