"""Full attention by Transformer Engine, which chooses among the fused kernels it has (cuDNN's, and flash-attention's where installed).

Where none of them takes the heads it would fall back to products and a softmax that keep every score, 3 GiB a layer for 8 samples of 4,096
tokens and 12 heads; that form is switched off, so that such heads are refused. NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 make it say why.
"""

import os
from functools import lru_cache

import torch
import transformer_engine.pytorch as te
from torch import Tensor

os.environ.setdefault("NVTE_UNFUSED_ATTN", "0")  # read whenever it chooses


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """As backends.py's: q [b, n, s, d], k, v [b, m, keys, d], queries the last of the keys' span. Sequence first, as layers have them."""
    mask = "causal" if q.shape[2] == k.shape[2] else "causal_bottom_right"
    attend = _attention(q.shape[1], k.shape[1], q.shape[3], scale, mask)
    return attend(*(_by_itself(x.permute(2, 0, 1, 3)) for x in (q, k, v))).unflatten(-1, (q.shape[1], -1)).permute(1, 2, 0, 3)


def _by_itself(x: Tensor) -> Tensor:
    """Transformer Engine infers from offsets and storage how tensors lie, and takes the rest for granted: slices are copied."""
    alone = x.is_contiguous() and x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if alone else x.clone(memory_format=torch.contiguous_format)


@lru_cache
def _attention(heads: int, kv_heads: int, width: int, scale: float, mask: str) -> te.DotProductAttention:
    """It has no parameters."""
    return te.DotProductAttention(
        heads, width, num_gqa_groups=kv_heads, attention_dropout=0.0, qkv_format="sbhd", attn_mask_type=mask, softmax_scale=scale
    )
