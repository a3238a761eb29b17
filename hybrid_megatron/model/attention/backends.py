"""Kernels of full causal attention on CUDA: which there are, which are asked for, and which of them run here.

`model.attention.backend` names one. auto is cuDNN's, which measured 1.7 times flash-2 on an H200, then flash, then torch's other two; the
choice is torch's, call by call. flex is FlexAttention, which documents and windows take in any case. Queries that are the last of their
keys' span, as context ranks have them, cuDNN takes in two parts (two_parts.py). A CPU has one kernel, in two parts too.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from hybrid_megatron.model.attention import two_parts
from hybrid_megatron.model.attention.block_masks import window_blocks
from hybrid_megatron.model.attention.flex import flex

_OF_SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""In the order of auto."""
BACKENDS = ("auto", *_OF_SDPA, "flex", "te")
_OF_16_BITS = (torch.bfloat16, torch.float16)
"""What cudnn and flash take; the others' fastest is efficient."""
_TOKENS = 256  # of a trial


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float, backend: str) -> Tensor:
    """softmax(scale * q k^T) v of queries that are the last ones of the keys' span; q [b, n, s, d], k, v [b, m, keys, d]."""
    if q.is_cuda and backend == "flex":
        return flex(q, k, v, window_blocks(q.shape[2], k.shape[2], k.shape[2], str(q.device)), scale)
    if q.is_cuda and backend == "te":
        from hybrid_megatron.model.attention import transformer_engine  # only where it is installed

        return transformer_engine.causal(q, k, v, scale)
    square = q.shape[2] == k.shape[2]
    if not square and (not q.is_cuda or backend in ("auto", "cudnn")) and two_parts.takes(q, k, v):
        return two_parts.causal_in_two_parts(q, k, v, scale)
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda and (backend == "efficient" or (backend == "auto" and q.dtype not in _OF_16_BITS)):  # it has no groups
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    bias = None if square else causal_lower_right(q.shape[2], k.shape[2])
    more = {"attn_mask": bias, "is_causal": square, "scale": scale, "enable_gqa": grouped}
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, **more)
    with sdpa_kernel(list(_OF_SDPA.values()) if backend == "auto" else [_OF_SDPA[backend]], set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, **more)


def first_that_runs(backend: str, heads: int, kv_heads: int, width: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """The backend itself, or the one that auto takes, if it runs forward and backward for such heads; None if none does."""
    candidates = _OF_SDPA if backend == "auto" else (backend,)
    return next((name for name in candidates if _runs(name, heads, kv_heads, width, dtype, device)), None)


def _runs(backend: str, heads: int, kv_heads: int, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    # In memory as layers have it: tokens before heads.
    q, k, v = (torch.zeros(1, _TOKENS, n, width, dtype=dtype, device=device, requires_grad=True) for n in (heads, kv_heads, kv_heads))
    try:
        with torch.enable_grad():
            causal(*(x.transpose(1, 2) for x in (q, k, v)), width**-0.5, backend).sum().backward()
    except Exception:  # torch and Triton have exceptions of many kinds for what a kernel cannot do
        return False
    return True
