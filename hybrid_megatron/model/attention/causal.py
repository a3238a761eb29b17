"""Causal softmax attention over the whole context: on one device or with the sequence cut over context ranks, with or without documents.

Backends: CUDA takes cuDNN's SDPA first, then flash (cuDNN measured 1.7 times flash-2 on an H200), and FlexAttention for document masks,
so that no [s, s] mask is ever in memory; the CPU takes plain SDPA.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask

from hybrid_megatron.parallel import SequenceLayout
from hybrid_megatron.parallel.sequence_layout import gathered_order
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

_CUDA_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_BLOCK = 128  # FlexAttention skips blocks of this many queries and keys


def causal_attention(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, scale: float, context_group: ProcessGroup) -> Tensor:
    """softmax(scale * q k^T) v, each token over itself and all tokens before it (of its own document, if documents are masked).

    q [b, s, n, d]; k, v [b, s, m, d] with n a multiple of m (grouped-query attention); s is the local length. Returns [b, s, n, d].
    With context parallelism the keys and values of all ranks are gathered, and each local chunk attends to the keys up to its own end.
    """
    assert q.shape[1] == layout.local_length, f"{q.shape[1]} tokens under a layout of {layout.local_length}"
    k, v = _gather_keys_and_values(k, v, layout, context_group)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    documents = None if layout.document_starts is None else layout.document_starts.long().cumsum(1)
    length = layout.chunk_length
    outputs = []
    for i, chunk in enumerate(layout.chunks):
        end = (chunk + 1) * length
        queries, keys, values = q[:, :, i * length : (i + 1) * length], k[:, :, :end], v[:, :, :end]
        if documents is None:
            outputs.append(_causal(queries, keys, values, scale))
        else:
            outputs.append(_causal_in_documents(queries, keys, values, scale, documents[:, :end]))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _gather_keys_and_values(k: Tensor, v: Tensor, layout: SequenceLayout, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole sample in sequence order; the backward pass sums each rank's share of their gradients."""
    if layout.size == 1:
        return k, v
    both = torch.cat((k, v), dim=-1).transpose(0, 1).contiguous()
    whole = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=group)
    pieces = whole.split(layout.chunk_length, dim=0)
    ordered = torch.cat([pieces[place] for place in gathered_order(layout.size)], dim=0).transpose(0, 1)
    return ordered.split((k.shape[-1], v.shape[-1]), dim=-1)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The queries are the last ones of the keys' span. [b, n, s, d]."""
    grouped = q.shape[1] != k.shape[1]
    bias = None if q.shape[2] == k.shape[2] else causal_lower_right(q.shape[2], k.shape[2])
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None, scale=scale, enable_gqa=grouped)
    with sdpa_kernel(_CUDA_BACKENDS, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None, scale=scale, enable_gqa=grouped)


def _causal_in_documents(q: Tensor, k: Tensor, v: Tensor, scale: float, documents: Tensor) -> Tensor:
    """As `_causal`, within documents; documents [b, keys] numbers each key's document."""
    offset = k.shape[2] - q.shape[2]
    if q.is_cuda:
        return _flex_in_documents(q, k, v, scale, documents, offset)
    position = torch.arange(k.shape[2], device=q.device)
    mask = position[offset:, None] >= position[None]
    mask = mask & (documents[:, offset:, None] == documents[:, None, :])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def _flex_in_documents(q: Tensor, k: Tensor, v: Tensor, scale: float, documents: Tensor, offset: int) -> Tensor:
    mask = _document_blocks(documents, q.shape[2], offset)
    return _compiled_flex()(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def _document_blocks(documents: Tensor, queries: int, offset: int) -> BlockMask:
    """FlexAttention's mask for `queries` queries, the first at key `offset`; documents [b, keys].

    torch's create_block_mask would first build the [b, queries, keys] mask. Document numbers only rise along a row, so the ends of two
    blocks tell whether the queries of one see all, some or none of the keys of the other.
    """
    keys = documents.shape[1]

    def blocks(first: int) -> tuple[Tensor, Tensor]:
        """First and last place of each block of the places from `first` on."""
        begin = torch.arange(first, keys, _BLOCK, device=documents.device)
        return begin, (begin + _BLOCK - 1).clamp_max(keys - 1)

    (query, last_query), (key, last_key) = ((x[:, None] for x in blocks(offset)), blocks(0))
    some = (key <= last_query) & (documents[:, torch.minimum(last_key, last_query)] >= documents[:, query])
    every = (last_key <= query) & (documents[:, None, key] == documents[:, last_query])
    every = every & (last_query - query == _BLOCK - 1)  # a last block that is not full needs the mask

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        """[b, 1, query blocks] number of chosen key blocks, and [b, 1, query blocks, key blocks] their places, the chosen ones first."""
        chosen = chosen[:, None].int()
        return chosen.sum(-1, dtype=torch.int32), chosen.argsort(dim=-1, descending=True, stable=True).int()

    def visible(b, h, query, key):
        return (query + offset >= key) & (documents[b, query + offset] == documents[b, key])

    return BlockMask.from_kv_blocks(
        *listed(some & ~every), *listed(every), BLOCK_SIZE=_BLOCK, mask_mod=visible, seq_lengths=(queries, keys)
    )


@lru_cache(maxsize=1)
def _compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)  # uncompiled it holds [s, s]: rather an error
