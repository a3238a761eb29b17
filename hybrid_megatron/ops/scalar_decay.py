"""Linear attention with one forget gate a head, the recurrence of Mamba2 (Dao and Gu, 2024, arXiv 2405.21060):

    S_t = e^{g_t} S_{t-1} + k_t^T v_t        o_t = scale * q_t S_t

per head, with row vectors q_t, k_t [K], v_t [V], log gates g_t, finite and <= 0, state S [K, V].

On CUDA it is FLA's chunk_simple_gla. Its forward pass rounds the states that chunks start from to the type of q; the sums behind them, the
initial and the final state are float32, and so are all states in the backward pass, which computes them again. On Hopper FLA refuses it
for triton 3.4 to 3.7.0, as it does the gated delta rule (ops/kernel_check.py). chunk_gla on gates repeated over the channels is not
refused, but keeps 2 K + 64 more float32 numbers for every token and head and multiplies every channel by a gate of its own.
"""

from functools import partial

import torch
from torch import Tensor

from hybrid_megatron.ops import decay
from hybrid_megatron.ops.chunks import cut, join, visible
from hybrid_megatron.ops.documents import over_documents
from hybrid_megatron.ops.gated_linear_attention import GatedLinearAttention
from hybrid_megatron.ops.recurrence import Recurrence

CHUNK = 16


class ScalarDecay(GatedLinearAttention):
    """Inputs q, k [b, s, n, K], v [b, s, n, V], g [b, s, n] float32; transitions [b, n, K, 1], one number a head."""

    def run(self, inputs, *, scale, initial_state=None, document_starts=None):
        if not inputs[0].is_cuda:
            return chunked(*inputs, scale=scale, initial_state=initial_state, document_starts=document_starts)
        from fla.ops.simple_gla import chunk_simple_gla

        return over_documents(partial(chunk_simple_gla, scale=scale, output_final_state=True), inputs, initial_state, document_starts)

    def recurrent(self, inputs, *, scale, initial_state=None, document_starts=None):
        q, k, v, g = inputs
        return decay.recurrent(q, k, v, g[..., None], scale=scale, initial_state=initial_state, document_starts=document_starts)

    @torch.no_grad()
    def summary(self, inputs, document_starts=None):
        q, k, v, g = inputs
        if g.is_cuda:
            from hybrid_megatron.ops import state_kernels

            transition = decay.cut_by_documents(g.sum(1).exp()[..., None, None], document_starts)
            added = state_kernels.decayed_sum(k, v, document_starts, g=g)
        else:
            transition, added = super().summary((q, k, v, g[..., None]), document_starts)
        return transition.expand(-1, -1, k.shape[-1], -1), added

    def initial_state_gradient(self, inputs, grad, *, scale, document_starts=None):
        if not grad.is_cuda:
            return Recurrence.initial_state_gradient(self, inputs, grad, scale=scale, document_starts=document_starts)
        from hybrid_megatron.ops import state_kernels

        return state_kernels.gradient_under_decay(inputs[0], grad, scale, document_starts, g=inputs[3])


def chunked(q, k, v, g, *, scale: float, initial_state=None, document_starts=None) -> tuple[Tensor, Tensor]:
    """(o, final state) in chunks of 16 tokens, for the CPU; float32 for lower precisions, the given dtype otherwise."""
    work = torch.promote_types(q.dtype, torch.float32)
    length, out_dtype = q.shape[1], v.dtype
    q, k, v, g = (cut(x, CHUNK, work) for x in (q, k, v, g[..., None]))
    q = q * scale
    decays = decay.between_tokens(g, visible(document_starts, CHUNK, q.device))
    scores = decays[..., 1:, 0] * (q @ k.mT)
    o, final = decay.through_chunks(q, k, v, scores, decays, initial_state)
    return join(o, length).to(out_dtype), final
