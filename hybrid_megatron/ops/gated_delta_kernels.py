"""The gated delta rule by the parts of flash-linear-attention's kernels (0.6.0, gated_delta_rule/chunk.py), what passes between them kept.

FLA's own function computes the chunks' updates and states again in its backward pass. They take K + V + K V / 64 elements a token and
head, 1 KiB in bfloat16 at 128 channels; computing them takes an eighth of the recurrence's time.
"""

import torch
from torch import Tensor

from hybrid_megatron.ops.recurrence import KERNEL_CHUNK
from hybrid_megatron.ops.state_kernels import sums_of_gates


def kept_elements(width_k: int, width_v: int) -> int:
    """Of a token and head: what multiplies the state in its update, the update, and a chunk's share of the state it starts from."""
    return width_k + width_v + width_k * width_v // KERNEL_CHUNK


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, initial_state: Tensor | None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(o [b, s, n, V], final states): what FLA's function of this name returns with output_final_state."""
    return _GatedDeltaRule.apply(*(x.contiguous() for x in (q, k, v, g, beta)), scale, initial_state, cu_seqlens)


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, scale, initial_state, cu_seqlens):
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h
        from fla.ops.common.chunk_o import chunk_fwd_o
        from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra

        shared = {"cu_seqlens": cu_seqlens, "chunk_size": KERNEL_CHUNK}
        g = sums_of_gates(g, cu_seqlens)
        w, u, inverse = chunk_gated_delta_rule_fwd_intra(k, v, g, beta, **shared)
        states, updates, last = chunk_gated_delta_rule_fwd_h(k, w, u, g, initial_state=initial_state, output_final_state=True, **shared)
        ctx.save_for_backward(q, k, v, g, beta, inverse, w, updates, states, initial_state)
        ctx.scale, ctx.cu_seqlens = scale, cu_seqlens  # FLA's tables go by its identity
        return chunk_fwd_o(q, k, updates, states, g=g, scale=scale, **shared), last

    @staticmethod
    def backward(ctx, grad: Tensor, of_last: Tensor):
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu
        from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv_local
        from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd
        from fla.ops.utils import chunk_local_cumsum

        q, k, v, g, beta, inverse, w, updates, states, initial_state = ctx.saved_tensors
        shared = {"cu_seqlens": ctx.cu_seqlens, "chunk_size": KERNEL_CHUNK}
        grad, of_last = grad.contiguous(), of_last.contiguous()
        of_updates = chunk_bwd_dv_local(q, k, grad, g=g, scale=ctx.scale, **shared)
        of_states, of_initial, of_updates = chunk_gated_delta_rule_bwd_dhu(
            q, k, w, grad, of_updates, g=g, h0=initial_state, dht=of_last, scale=ctx.scale, **shared
        )
        of_q, of_k, of_w, of_g = chunk_bwd_dqkwg(q, k, updates, grad, states, of_states, w=w, g=g, dv=of_updates, scale=ctx.scale, **shared)
        more_of_k, of_v, of_beta, more_of_g = prepare_wy_repr_bwd(k, v, beta, inverse, of_w, of_updates, g, ctx.cu_seqlens)
        of_g = chunk_local_cumsum(of_g.add_(more_of_g), KERNEL_CHUNK, reverse=True, cu_seqlens=ctx.cu_seqlens)
        return of_q, of_k.add_(more_of_k), of_v, of_g, of_beta, None, of_initial, None
