"""Gated linear attention (Yang et al., 2024, arXiv 2312.06635, equation 3): each row of the state decays by its own gate.

    S_t = Diag(e^{g_t}) S_{t-1} + k_t^T v_t        o_t = scale * q_t S_t

per head, with row vectors q_t, k_t [K], v_t [V], log gates g_t [K], finite and <= 0, state S [K, V].
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.ops import decay
from hybrid_megatron.ops.chunks import cut, join, visible
from hybrid_megatron.ops.documents import over_documents
from hybrid_megatron.ops.recurrence import Recurrence

CHUNK = 16


class GatedLinearAttention(Recurrence):
    """Inputs q, k [b, s, n, K], v [b, s, n, V], g [b, s, n, K] float32; transitions [b, n, K, 1]."""

    input_names = ("q", "k", "v", "g")
    states_by_kernels = True

    def run(self, inputs, *, scale, initial_state=None, document_starts=None):
        if not inputs[0].is_cuda:
            return chunked(*inputs, scale=scale, initial_state=initial_state, document_starts=document_starts)
        from fla.ops.gla import chunk_gla

        from hybrid_megatron.ops.fla_backend import register_own_kernels

        register_own_kernels()
        return over_documents(partial(chunk_gla, scale=scale, output_final_state=True), inputs, initial_state, document_starts)

    def recurrent(self, inputs, *, scale, initial_state=None, document_starts=None):
        return decay.recurrent(*inputs, scale=scale, initial_state=initial_state, document_starts=document_starts)

    @torch.no_grad()
    def summary(self, inputs, document_starts=None):
        _, k, v, g = inputs
        if g.is_cuda:
            from hybrid_megatron.ops import state_kernels

            transition = decay.cut_by_documents(g.sum(1).exp()[..., None], document_starts)
            return transition, state_kernels.decayed_sum(k, v, document_starts, gk=g)
        g = g.to(torch.promote_types(g.dtype, torch.float32))
        # Summed from the end: the tokens that matter most, the last ones, get the sums of the fewest gates.
        after = F.pad(g[:, 1:], (0, 0, 0, 0, 0, 1)).flip(1).cumsum(1).flip(1)
        transition = (after[:, 0] + g[:, 0]).exp()[..., None]
        return decay.cut_by_documents(transition, document_starts), decay.decayed_sum(k, v, after, document_starts)

    def initial_state_gradient(self, inputs, grad, *, scale, document_starts=None):
        if not grad.is_cuda:
            return super().initial_state_gradient(inputs, grad, scale=scale, document_starts=document_starts)
        from hybrid_megatron.ops import state_kernels

        return state_kernels.gradient_under_decay(inputs[0], grad, scale, document_starts, gk=inputs[3])


def chunked(q, k, v, g, *, scale: float, initial_state=None, document_starts=None) -> tuple[Tensor, Tensor]:
    """(o, final state) in chunks of 16 tokens, for the CPU; float32 for lower precisions, the given dtype otherwise."""
    work = torch.promote_types(q.dtype, torch.float32)
    length, out_dtype = q.shape[1], v.dtype
    q, k, v, g = (cut(x, CHUNK, work) for x in (q, k, v, g))
    q = q * scale
    decays = decay.between_tokens(g, visible(document_starts, CHUNK, q.device))
    scores = (q[..., :, None, :] * decays[..., 1:, :] * k[..., None, :, :]).sum(-1)
    o, final = decay.through_chunks(q, k, v, scores, decays, initial_state)
    return join(o, length).to(out_dtype), final
