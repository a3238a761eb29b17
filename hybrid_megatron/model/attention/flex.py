"""FlexAttention, compiled: attention under a block mask on CUDA, with no [s, s] mask or scores in memory."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

_MOST_SHAPES = 64  # kept by torch.compile, which refuses any more; its own 8 are few for windows that differ by layer, chunk and stage


def flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """q [b, n, queries, d]; k, v [b, m, keys, d] with n a multiple of m; a mask of batch dimension b or 1. Returns q's shape."""
    # Below 128 queries torch takes its decoding kernel, which finds no tile once queries times heads of a group exceed a block.
    options = {"FORCE_USE_FLEX_ATTENTION": True} if q.shape[2] < 128 else None
    return _compiled()(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1], kernel_options=options)


@lru_cache(maxsize=1)
def _compiled():
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_SHAPES)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)  # uncompiled it holds [s, s]: rather an error
