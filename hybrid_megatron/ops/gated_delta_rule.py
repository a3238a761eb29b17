"""The gated delta rule, the recurrence of Gated DeltaNet (Yang et al., 2024, arXiv 2412.06464, equation 10), in three forms.

    S_t = e^{g_t} (I - beta_t k_t^T k_t) S_{t-1} + beta_t k_t^T v_t        o_t = scale * q_t S_t

per head, with row vectors q_t, k_t [K], v_t [V], log gate g_t <= 0, beta_t in (0, 2), state S [K, V]. A document start resets the state
to zero before its first token. `recurrent` is the definition, token by token; `chunked` is the same in chunks of tokens, for the CPU;
`gated_delta_rule` picks FLA's Triton kernels on CUDA and `chunked` elsewhere.

Shapes: q, k [b, s, n, K]; v [b, s, n, V]; g, beta [b, s, n]; initial_state [b, n, K, V]; document_starts [b, s] bool or None. All forms
return (o [b, s, n, V] in v's dtype, final state [b, n, K, V]).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.ops.triangular import inverse_unit_lower

CHUNK = 64


def gated_delta_rule(q, k, v, g, beta, *, scale: float, initial_state=None, document_starts=None) -> tuple[Tensor, Tensor]:
    """The fast form for the device the tensors are on. `k` is expected L2-normalised; g, beta and the states are float32."""
    if q.is_cuda:
        return _fla(q, k, v, g, beta, scale, initial_state, document_starts)
    return chunked(q, k, v, g, beta, scale=scale, initial_state=initial_state, document_starts=document_starts)


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
    out_dtype = v.dtype
    work = torch.promote_types(q.dtype, torch.float32)
    batch, length, heads, _ = k.shape
    pad = -length % chunk
    count = (length + pad) // chunk

    def cut(x: Tensor) -> Tensor:
        """[b, s, n, ...] -> [b, n, count, chunk, ...]; padding has zero beta and gate, so it leaves the state as it is."""
        x = F.pad(x.to(work), (0, 0) * (x.dim() - 2) + (0, pad))
        return x.unflatten(1, (count, chunk)).movedim(3, 1)

    q, k, v = cut(q) * scale, cut(k), cut(v)
    total = cut(g).cumsum(-1)
    beta = cut(beta)[..., None]
    same = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    into, out_of = None, None  # which tokens still see the chunk's first state; which still count in its last
    if document_starts is not None:
        document = F.pad(document_starts, (0, pad)).unflatten(1, (count, chunk)).long().cumsum(-1)[:, None]  # [b, 1, count, chunk]
        same = same & (document[..., :, None] == document[..., None, :])
        into, out_of = document == 0, document == document[..., -1:]

    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~same, float("-inf")).exp()
    from_start = total.exp() if into is None else total.exp() * into
    to_end = (total[..., -1:] - total).exp()
    to_end = to_end if out_of is None else to_end * out_of

    solve = inverse_unit_lower(beta * decay * (k @ k.mT))
    update_alone = solve @ (beta * v)
    update_per_state = solve @ (beta * from_start[..., None] * k)
    scores = decay * (q @ k.mT)
    q_start = q * from_start[..., None]
    k_end = k * to_end[..., None]
    keep = from_start[..., -1, None, None]

    state = initial_state.to(work) if initial_state is not None else q.new_zeros(batch, heads, k.shape[-1], v.shape[-1])
    outputs = []
    for c in range(count):
        update = update_alone[:, :, c] - update_per_state[:, :, c] @ state
        outputs.append(q_start[:, :, c] @ state + scores[:, :, c] @ update)
        state = keep[:, :, c] * state + k_end[:, :, c].mT @ update
    o = torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length].transpose(1, 2)
    return o.to(out_dtype), state


def _fla(q, k, v, g, beta, scale, initial_state, document_starts) -> tuple[Tensor, Tensor]:
    """FLA 0.6.0's chunk_gated_delta_rule. Documents become its variable-length sequences, over all rows in one."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    if document_starts is None:
        return chunk_gated_delta_rule(q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=True)

    batch, length = document_starts.shape
    begins = document_starts.clone()
    begins[:, 0] = True
    flat = begins.flatten().nonzero()[:, 0]
    cu_seqlens = F.pad(flat, (0, 1), value=batch * length)
    states = None
    if initial_state is not None:  # only a row whose first token continues a document takes its state over
        first = torch.searchsorted(flat, torch.arange(batch, device=flat.device) * length)
        states = initial_state.new_zeros(len(flat), *initial_state.shape[1:])
        states = states.index_copy(0, first, initial_state.masked_fill(document_starts[:, :1, None, None], 0.0))
    o, final = chunk_gated_delta_rule(
        *(x.flatten(0, 1)[None] for x in (q, k, v, g, beta)),
        scale=scale, initial_state=states, output_final_state=True, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    last = torch.searchsorted(flat, torch.arange(1, batch + 1, device=flat.device) * length) - 1
    return o.unflatten(1, (batch, length))[0], final[last]
