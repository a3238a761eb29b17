"""The gated delta rule, the recurrence of Gated DeltaNet (Yang et al., 2024, arXiv 2412.06464, equation 10), in three forms.

    S_t = e^{g_t} (I - beta_t k_t^T k_t) S_{t-1} + beta_t k_t^T v_t        o_t = scale * q_t S_t

per head, with row vectors q_t, k_t [K], v_t [V], log gate g_t <= 0, beta_t in (0, 2), state S [K, V]. A document start resets the state
to zero before its first token. `recurrent` is the definition, token by token; `chunked` is the same in chunks of tokens, for the CPU;
`gated_delta_rule` picks FLA's Triton kernels on CUDA and `chunked` elsewhere.

Shapes: q, k [b, s, n, K]; v [b, s, n, V]; g, beta [b, s, n]; initial_state [b, n, K, V]; document_starts [b, s] bool or None. All forms
return (o [b, s, n, V] in v's dtype, final state [b, n, K, V]).
"""

from functools import partial

import torch
from torch import Tensor

from hybrid_megatron.ops.chunks import cut, join, visible
from hybrid_megatron.ops.decay import cut_by_documents
from hybrid_megatron.ops.documents import over_documents
from hybrid_megatron.ops.recurrence import MatrixTransition
from hybrid_megatron.ops.triangular import inverse_unit_lower

CHUNK = 64


def gated_delta_rule(
    q, k, v, g, beta, *, scale: float, initial_state=None, document_starts=None, keeps_states: bool = False
) -> tuple[Tensor, Tensor]:
    """The fast form for the device the tensors are on. `k` is expected L2-normalised; g, beta and the states are float32.

    `keeps_states`: on CUDA keep the chunks' updates and states for the backward pass, which computes them again otherwise.
    """
    if not q.is_cuda:
        return chunked(q, k, v, g, beta, scale=scale, initial_state=initial_state, document_starts=document_starts)
    if keeps_states:
        from hybrid_megatron.ops.gated_delta_kernels import chunk_gated_delta_rule

        kernel = partial(chunk_gated_delta_rule, scale=scale)
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        kernel = partial(chunk_gated_delta_rule, scale=scale, output_final_state=True)
    return over_documents(kernel, (q, k, v, g, beta), initial_state, document_starts)


def recurrent(q, k, v, g, beta, *, scale: float, initial_state=None, document_starts=None) -> tuple[Tensor, Tensor]:
    """The definition, one token after the other; differentiable, in the dtype given (float64 in tests)."""
    batch, length, heads, width_k = k.shape
    state = initial_state if initial_state is not None else k.new_zeros(batch, heads, width_k, v.shape[-1])
    outputs = []
    for t in range(length):
        if document_starts is not None:
            state = state.masked_fill(document_starts[:, t, None, None, None], 0.0)
        state = state * g[:, t, :, None, None].exp()
        error = v[:, t] - torch.einsum("bnk,bnkv->bnv", k[:, t], state)
        state = state + torch.einsum("bnk,bnv->bnkv", k[:, t], beta[:, t, :, None] * error)
        outputs.append(scale * torch.einsum("bnk,bnkv->bnv", q[:, t], state))
    return torch.stack(outputs, dim=1), state


def chunked(q, k, v, g, beta, *, scale: float, initial_state=None, document_starts=None, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Chunks of `chunk` tokens: within one, a triangular system gives every token's update; between them, only the state passes.

    With G_t the gates summed from the chunk's start, D_tj = e^{G_t - G_j}, and S the state at that start, the updates u_t obey
    (I + tril(beta_t D_tj k_t.k_j, -1)) U = beta (V - e^G K S), and then o = scale (e^G Q S + tril(D Q K^T) U) and
    S' = e^{G_C} S + sum_j e^{G_C - G_j} k_j^T u_j. Every exponent is <= 0. A document start cuts all terms that reach across it.
    Computes in float32 for lower precisions, in the given dtype otherwise.
    """
    work = torch.promote_types(q.dtype, torch.float32)
    length, out_dtype = q.shape[1], v.dtype
    # Padding has zero beta and gate, so it leaves the state as it is.
    q, k, v, beta = cut(q, chunk, work) * scale, cut(k, chunk, work), cut(v, chunk, work), cut(beta, chunk, work)[..., None]
    total = cut(g, chunk, work).cumsum(-1)
    seen = visible(document_starts, chunk, q.device)

    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~seen[..., 1:], float("-inf")).exp()
    from_start = total.exp() * seen[..., 0]
    to_end = (total[..., -1:] - total).exp() * seen[..., -1, 1:]

    solve = inverse_unit_lower(beta * decay * (k @ k.mT))
    update_alone = solve @ (beta * v)
    update_per_state = solve @ (beta * from_start[..., None] * k)
    scores = decay * (q @ k.mT)
    q_start = q * from_start[..., None]
    k_end = k * to_end[..., None]
    keep = from_start[..., -1, None, None]

    state = initial_state.to(work) if initial_state is not None else k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for c in range(k.shape[2]):
        update = update_alone[:, :, c] - update_per_state[:, :, c] @ state
        outputs.append(q_start[:, :, c] @ state + scores[:, :, c] @ update)
        state = keep[:, :, c] * state + k_end[:, :, c].mT @ update
    return join(torch.stack(outputs, dim=2), length).to(out_dtype), state


class GatedDeltaRule(MatrixTransition):
    """Inputs q, k [b, s, n, K], v [b, s, n, V], g, beta [b, s, n] float32; transitions [b, n, K, K]."""

    input_names = ("q", "k", "v", "g", "beta")
    states_by_kernels = True

    def __init__(self, keeps_states: bool = False):
        """`keeps_states` as gated_delta_rule has it."""
        self.keeps_states = keeps_states

    def run(self, inputs, *, scale, initial_state=None, document_starts=None):
        known = dict(scale=scale, initial_state=initial_state, document_starts=document_starts)
        return gated_delta_rule(*inputs, **known, keeps_states=self.keeps_states)

    def recurrent(self, inputs, *, scale, initial_state=None, document_starts=None):
        return recurrent(*inputs, scale=scale, initial_state=initial_state, document_starts=document_starts)

    @torch.no_grad()
    def summary(self, inputs, document_starts=None):
        if not inputs[0].is_cuda:
            return super().summary(inputs, document_starts)
        from hybrid_megatron.ops import state_kernels

        transition, added = state_kernels.gated_delta_summary(*inputs[1:], document_starts)
        return cut_by_documents(transition, document_starts), added

    def initial_state_gradient(self, inputs, grad, *, scale, document_starts=None):
        if not grad.is_cuda:
            return super().initial_state_gradient(inputs, grad, scale=scale, document_starts=document_starts)
        from hybrid_megatron.ops import state_kernels

        return state_kernels.gradient_under_gated_delta(*inputs, grad, scale, document_starts)
