"""States alone, by the parts of flash-linear-attention's kernels that pass them on: no output, and no gradient of a token's, is computed.

What is here takes inputs as the recurrences do, [b, s, n, ...] on CUDA, and gates in float32; `starts` are document starts [b, s] bool or
None. `added` and `transition` are those of Recurrence.summary, gradients those of Recurrence.initial_state_gradient; each function names
the part of FLA 0.6.0 that it follows. Kernels get what they get in a training step (a last state's gradient, though it is zero), since
they are tuned for that.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_megatron.ops.documents import sequences_of
from hybrid_megatron.ops.recurrence import KERNEL_CHUNK
from hybrid_megatron.ops.row_copy import batch_first

_NONE_BETWEEN = 2**30
"""Tokens from one state that a kernel writes down to the next."""


def decayed_sum(k: Tensor, v: Tensor, starts: Tensor | None, **decay: Tensor) -> Tensor:
    """added [b, n, K, V] of recurrences that decay and add (common/chunk_h.py); `decay` is one of g [b, s, n], gk [b, s, n, K] and
    g_gamma [n]."""
    from fla.ops.common.chunk_h import chunk_fwd_h

    def kernel(k, v, *gates, cu_seqlens):
        sums = _decay_for_kernels(decay, gates, cu_seqlens)
        sizes = {"chunk_size": KERNEL_CHUNK, "split_size": _NONE_BETWEEN}
        return chunk_fwd_h(k, v, **sums, output_final_state=True, cu_seqlens=cu_seqlens, **sizes)[1]

    return _of_last_sequences(kernel, (k, v, *_by_token(decay)), starts)


def gradient_under_decay(q: Tensor, grad: Tensor, scale: float, starts: Tensor | None, **decay: Tensor) -> Tensor:
    """Of the initial state [b, n, K, V], from that of the output [b, s, n, V]; `decay` as in `decayed_sum` (common/chunk_h.py)."""
    from fla.ops.common.chunk_h import chunk_bwd_dh

    def kernel(q, grad, *gates, cu_seqlens):
        sums = _decay_for_kernels(decay, gates, cu_seqlens)
        sizes = {"chunk_size": KERNEL_CHUNK, "split_size": _NONE_BETWEEN, "states_in_fp32": True}
        state = _zero_states(q, grad, cu_seqlens)
        # Of k, v and the first state it asks the shape alone.
        return chunk_bwd_dh(q, q, grad, grad, state, state, scale, **sums, cu_seqlens=cu_seqlens, **sizes)[1]

    return _of_first_sequences(kernel, (q, grad, *_by_token(decay)), starts)


def gated_delta_summary(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """(transition [b, n, K, K], added [b, n, K, V]) of the gated delta rule (gated_delta_rule/chunk.py)."""
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra

    def kernel(k, v, g, beta, *, cu_seqlens):
        g = sums_of_gates(g, cu_seqlens)
        w, u, _ = chunk_gated_delta_rule_fwd_intra(k, v, g, beta, cu_seqlens=cu_seqlens, chunk_size=KERNEL_CHUNK)
        return _last_states(k, w, u, cu_seqlens, g=g)

    return _cut(_of_last_sequences(kernel, (k, v, g, beta), starts), v.shape[-1])


def gradient_under_gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, grad: Tensor, scale: float, starts: Tensor | None
) -> Tensor:
    """Of the initial state [b, n, K, V], from that of the output (gated_delta_rule/chunk.py)."""
    from fla.ops.common.chunk_o import chunk_bwd_dv_local
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra

    def kernel(q, k, v, g, beta, grad, *, cu_seqlens):
        g = sums_of_gates(g, cu_seqlens)
        w, _, _ = chunk_gated_delta_rule_fwd_intra(k, v, g, beta, cu_seqlens=cu_seqlens, chunk_size=KERNEL_CHUNK)
        dv = chunk_bwd_dv_local(q, k, grad, g=g, scale=scale, cu_seqlens=cu_seqlens, chunk_size=KERNEL_CHUNK)
        return _first_gradients(q, k, w, grad, dv, scale, cu_seqlens, g=g)

    return _of_first_sequences(kernel, (q, k, v, g, beta, grad), starts)


def kimi_delta_summary(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """(transition [b, n, K, K], added [b, n, K, V]) of the delta rule with a gate of each channel (kda/chunk_fwd.py)."""

    def kernel(q, k, v, g, beta, *, cu_seqlens):
        w, u, _, decayed_k, _, g = _kimi_factors(q, k, v, g, beta, 1.0, cu_seqlens)
        return _last_states(decayed_k, w, u, cu_seqlens, gk=g)

    return _cut(_of_last_sequences(kernel, (q, k, v, g, beta), starts), v.shape[-1])


def gradient_under_kimi_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, grad: Tensor, scale: float, starts: Tensor | None
) -> Tensor:
    """Of the initial state [b, n, K, V], from that of the output (kda/chunk_bwd.py)."""
    from fla.ops.kda.chunk_bwd import chunk_kda_bwd_dAv

    def kernel(q, k, v, g, beta, grad, *, cu_seqlens):
        w, _, decayed_q, decayed_k, scores, g = _kimi_factors(q, k, v, g, beta, scale, cu_seqlens)
        _, dv = chunk_kda_bwd_dAv(q, k, v, grad, A=scores, scale=scale, cu_seqlens=cu_seqlens, chunk_size=KERNEL_CHUNK)
        return _first_gradients(decayed_q, decayed_k, w, grad, dv, scale, cu_seqlens, gk=g)

    return _of_first_sequences(kernel, (q, k, v, g, beta, grad), starts)


def _kimi_factors(q, k, v, g, beta, scale: float, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    """(w, u, q and k decayed to their chunk's ends, scores of q and k, sums of gates)."""
    from fla.ops.kda.chunk_intra import chunk_kda_fwd_intra

    g = sums_of_gates(g, cu_seqlens)
    w, u, decayed_q, decayed_k, scores, _ = chunk_kda_fwd_intra(
        q, k, v, gk=g, beta=beta, scale=scale, cu_seqlens=cu_seqlens, chunk_size=KERNEL_CHUNK, disable_recompute=True
    )
    return w, u, decayed_q, decayed_k, scores, g


def _last_states(k: Tensor, w: Tensor, u: Tensor, cu_seqlens: Tensor | None, **sums: Tensor) -> Tensor:
    """[added | transition] [sequences, n, K, V + K] of a delta rule: with updates [u | 0] from the state [0 | I]."""
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h

    width_k, width_v = k.shape[-1], u.shape[-1]
    start = _zero_states(k, u, cu_seqlens, width_v + width_k)
    start[..., width_v:].diagonal(dim1=-2, dim2=-1).fill_(1.0)
    updates = torch.nn.functional.pad(u, (0, width_k))
    return chunk_gated_delta_rule_fwd_h(
        k, w, updates, **sums, initial_state=start, output_final_state=True, chunk_size=KERNEL_CHUNK, cu_seqlens=cu_seqlens
    )[2]


def _first_gradients(q, k, w, grad, dv, scale: float, cu_seqlens: Tensor | None, **sums: Tensor) -> Tensor:
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu

    state = _zero_states(k, grad, cu_seqlens)
    return chunk_gated_delta_rule_bwd_dhu(
        q, k, w, grad, dv, **sums, h0=state, dht=state, scale=scale, cu_seqlens=cu_seqlens, chunk_size=KERNEL_CHUNK
    )[1]


def _zero_states(k: Tensor, v: Tensor, cu_seqlens: Tensor | None, width: int | None = None) -> Tensor:
    """[sequences, n, K, V or width] float32."""
    count = k.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    return k.new_zeros(count, k.shape[2], k.shape[-1], width or v.shape[-1], dtype=torch.float32)


def sums_of_gates(g: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """From each chunk's first token on, to the base 2, as FLA's kernels take them."""
    from fla.ops.utils import chunk_local_cumsum
    from fla.ops.utils.constant import RCP_LN2

    return chunk_local_cumsum(g, KERNEL_CHUNK, scale=RCP_LN2, cu_seqlens=cu_seqlens)


def _by_token(decay: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return tuple(x for name, x in decay.items() if name != "g_gamma")


def _decay_for_kernels(decay: dict[str, Tensor], by_token: tuple[Tensor, ...], cu_seqlens: Tensor | None) -> dict[str, Tensor]:
    """`decay` with sums of the gates, in sequences, in place of the gates."""
    from fla.ops.utils.constant import RCP_LN2

    [name] = decay
    return {name: sums_of_gates(by_token[0], cu_seqlens) if by_token else decay[name] * RCP_LN2}


def _of_last_sequences(kernel: Callable[..., Tensor], inputs: tuple[Tensor, ...], starts: Tensor | None) -> Tensor:
    """What `kernel(*inputs, cu_seqlens=)` finds for each sequence: that of each row's last one."""
    inputs = tuple(batch_first(x) for x in inputs)
    if starts is None:
        return kernel(*inputs, cu_seqlens=None)
    sequences = sequences_of(starts)
    return kernel(*(x.flatten(0, 1)[None] for x in inputs), cu_seqlens=sequences.borders)[sequences.last]


def _of_first_sequences(kernel: Callable[..., Tensor], inputs: tuple[Tensor, ...], starts: Tensor | None) -> Tensor:
    """Alike: that of each row's first one, zero where that begins a document."""
    inputs = tuple(batch_first(x) for x in inputs)
    if starts is None:
        return kernel(*inputs, cu_seqlens=None)
    sequences = sequences_of(starts)
    found = kernel(*(x.flatten(0, 1)[None] for x in inputs), cu_seqlens=sequences.borders)[sequences.first]
    return found.masked_fill(starts[:, :1, None, None], 0.0)


def _cut(states: Tensor, width_v: int) -> tuple[Tensor, Tensor]:
    """[added | transition] -> (transition, added)."""
    return states[..., width_v:], states[..., :width_v]
