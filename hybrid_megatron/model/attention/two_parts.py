"""Causal attention of the last queries of a span, as context ranks have them: their own keys in one part, all earlier ones in another.

cuDNN's kernel has causal masks for as many queries as keys alone, and no mask at all for the earlier keys, which every query sees. The
parts are joined by their log-sum-exp, o = sum_i exp(l_i - l) o_i with l = log sum_i exp(l_i); with o and l of the whole, each part's
backward kernel gives exactly its share of the gradients (Ring Attention, arXiv:2310.01889; FlashAttention-2, arXiv:2307.08691, 3.1).
"""

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from hybrid_megatron.ops.fused import fused

_KERNELS = torch.ops.aten


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels of both parts run here: on CUDA cuDNN's, on a CPU torch's own."""
    return not q.is_cuda or can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, True, q.shape[1] != k.shape[1]), debug=False)


def causal_in_two_parts(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(scale * q k^T) v; q [b, n, s, d], the last s of the keys' span; k, v [b, m, keys, d], keys > s, n a multiple of m."""
    return _TwoParts.apply(q, k, v, scale)


class _TwoParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.before = scale, k.shape[2] - q.shape[2]
        (earlier_k, own_k), (earlier_v, own_v) = (x.split((ctx.before, q.shape[2]), dim=2) for x in (k, v))
        own, own_sums, ctx.of_own = _forward(q, own_k, own_v, True, scale)
        earlier, earlier_sums, ctx.of_earlier = _forward(q, earlier_k, earlier_v, False, scale)
        o, sums = _joined(own, own_sums, earlier, earlier_sums)
        # As the forward kernel writes it: torch keeps cuDNN's backward graphs by the strides of all others, and takes o's for known.
        o = o if o.stride() == own.stride() else own.copy_(o)
        ctx.save_for_backward(q, k, v, o, sums)
        return o

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, o, sums = ctx.saved_tensors
        (earlier_k, own_k), (earlier_v, own_v) = (x.split((ctx.before, q.shape[2]), dim=2) for x in (k, v))
        dq, dk, dv = _backward(gradient, q, own_k, own_v, o, sums, True, ctx.scale, ctx.of_own)
        earlier_dq, earlier_dk, earlier_dv = _backward(gradient, q, earlier_k, earlier_v, o, sums, False, ctx.scale, ctx.of_earlier)
        return dq + earlier_dq, torch.cat((earlier_dk, dk), dim=2), torch.cat((earlier_dv, dv), dim=2), None


@fused
def _joined(o: Tensor, sums: Tensor, other: Tensor, other_sums: Tensor) -> tuple[Tensor, Tensor]:
    whole = torch.logaddexp(sums, other_sums)
    share, other_share = ((x - whole).exp().unsqueeze(-1) for x in (sums, other_sums))
    return (o * share + other * other_share).to(o.dtype), whole


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, list]:
    """Output, log-sum-exp [b, n, s], and what else the backward kernel wants of the forward one."""
    if not q.is_cuda:
        return *_KERNELS._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale), []
    o, sums, *rest, _ = _KERNELS._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return o, sums.squeeze(-1), rest


def _backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, sums: Tensor, causal: bool, scale: float, rest: list):
    """Gradients of q, k and v; `o` and `sums` those of the whole."""
    if not q.is_cuda:
        return _KERNELS._scaled_dot_product_flash_attention_for_cpu_backward(gradient, q, k, v, o, sums, 0.0, causal, scale=scale)
    cum_seq_q, cum_seq_k, max_q, max_k, seed, offset = rest  # of dropout and of packed samples, which there are none of
    return _KERNELS._scaled_dot_product_cudnn_attention_backward(
        gradient, q, k, v, o, sums.unsqueeze(-1), seed, offset, None, cum_seq_q, cum_seq_k, max_q, max_k, 0.0, causal, scale=scale
    )
