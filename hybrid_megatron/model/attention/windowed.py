"""Sliding-window softmax attention: on one device or with the sequence cut over context ranks, with or without documents.

Backends: CUDA takes FlexAttention, which computes only the blocks that a window touches; the CPU takes masked SDPA over blocks of queries.
Work and memory grow as context times window. Under context parallelism each chunk gets the window - 1 keys and values before it, so what
travels does not grow with the context.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_megatron.model.attention.alignment import aligned
from hybrid_megatron.model.attention.block_masks import document_blocks, window_blocks
from hybrid_megatron.model.attention.causal import causal_attention
from hybrid_megatron.model.attention.chunks import joined
from hybrid_megatron.model.attention.flex import flex
from hybrid_megatron.parallel import SequenceLayout
from hybrid_megatron.parallel.halo import preceding_tokens

_LEAST_QUERIES = 64  # of a block of queries on the CPU: narrower windows would make too many products of too small matrices


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, window: int, scale: float, context_group: ProcessGroup | None
) -> Tensor:
    """softmax(scale * q k^T) v, token t over the tokens t - window + 1 .. t (of its own document, if documents are masked).

    q [b, s, n, d]; k, v [b, s, m, d] with n a multiple of m (grouped-query attention); s is the local length. Returns [b, s, n, d].
    A window as wide as the context is full causal attention.
    """
    assert window >= 1, f"a window of {window} tokens"
    if window >= layout.context:
        return causal_attention(q, k, v, layout, scale, context_group)
    documents = layout.documents()
    length = layout.chunk_length
    outputs = []
    for chunk, queries, (keys, values) in zip(layout.chunks, q.split(length, dim=1), _keys_and_values(k, v, layout, window, context_group)):
        end = (chunk + 1) * length
        seen = None if documents is None else documents[:, end - keys.shape[1] : end]
        outputs.append(_windowed(*(aligned(x).transpose(1, 2) for x in (queries, keys, values)), window, scale, layout, chunk, seen))
    return joined(outputs)


def _keys_and_values(k: Tensor, v: Tensor, layout: SequenceLayout, window: int, group: ProcessGroup | None) -> list[tuple[Tensor, Tensor]]:
    """Of each local chunk, the keys and values that its queries see: its own, and those of the window - 1 tokens before it."""
    if layout.size == 1:
        return [(k, v)]
    both = torch.cat((k, v), dim=-1)
    chunks = zip(preceding_tokens(both, window - 1, layout, group), both.split(layout.chunk_length, dim=1))
    return [torch.cat(tokens, dim=1).split((k.shape[-1], v.shape[-1]), dim=-1) for tokens in chunks]


def _windowed(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, layout: SequenceLayout, chunk: int, documents: Tensor | None
) -> Tensor:
    """The queries are a chunk, the last ones of the keys' span. q [b, n, s, d]; documents [b, keys] numbers each key's document, or
    None."""
    queries, keys = q.shape[2], k.shape[2]
    if not q.is_cuda:
        return _by_blocks_of_queries(q, k, v, window, scale, documents)
    if documents is None:
        return flex(q, k, v, window_blocks(queries, keys, window, str(q.device)), scale)
    return flex(q, k, v, layout.once(("blocks", chunk, window), lambda: document_blocks(documents, queries, window)), scale)


def _by_blocks_of_queries(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, documents: Tensor | None) -> Tensor:
    """Each block of max(window, 64) queries meets the keys from its first query's window to its last query."""
    offset, grouped = k.shape[2] - q.shape[2], q.shape[1] != k.shape[1]
    outputs, first = [], offset
    for queries in q.split(max(window, _LEAST_QUERIES), dim=2):
        end = first + queries.shape[2]
        span = slice(max(first - window + 1, 0), end)
        place = torch.arange(span.start, end, device=q.device)
        distance = place[first - span.start :, None] - place
        mask = (distance >= 0) & (distance < window)
        if documents is not None:
            mask = (mask & (documents[:, first:end, None] == documents[:, None, span]))[:, None]
        outputs.append(
            F.scaled_dot_product_attention(queries, k[:, :, span], v[:, :, span], attn_mask=mask, scale=scale, enable_gqa=grouped)
        )
        first = end
    return torch.cat(outputs, dim=2)
