"""Causal softmax attention over the whole context: on one device or with the sequence cut over context ranks, with or without documents.

backends.py has the kernels; on CUDA documents are masked by FlexAttention, so that no [s, s] mask is ever in memory, on a CPU by plain
SDPA.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_megatron.model.attention.alignment import aligned
from hybrid_megatron.model.attention.backends import causal
from hybrid_megatron.model.attention.block_masks import document_blocks
from hybrid_megatron.model.attention.chunks import joined
from hybrid_megatron.model.attention.flex import flex
from hybrid_megatron.parallel import SequenceLayout
from hybrid_megatron.parallel.all_to_all import heads_from_sequence, sequence_from_heads
from hybrid_megatron.parallel.sequence_layout import gathered_order
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    scale: float,
    context_group: ProcessGroup | None,
    exchange: Literal["gather", "all_to_all"] = "gather",
    backend: str = "auto",
) -> Tensor:
    """softmax(scale * q k^T) v, each token over itself and all tokens before it (of its own document, if documents are masked).

    q [b, s, n, d]; k, v [b, s, m, d] with n a multiple of m (grouped-query attention); s is the local length. Returns [b, s, n, d].
    With context parallelism, by `exchange`: "gather", the keys and values of all ranks are gathered, and each local chunk attends to the
    keys up to its own end; "all_to_all", each rank computes whole samples for its share of the heads, and both n and m must divide by
    the number of ranks. `backend` (backends.py) is asked on CUDA, where no documents are masked.
    """
    assert q.shape[1] == layout.local_length, f"{q.shape[1]} tokens under a layout of {layout.local_length}"
    if exchange == "all_to_all" and layout.size > 1:
        return _over_shares_of_heads(q, k, v, layout, scale, context_group, backend)
    assert exchange in ("gather", "all_to_all"), exchange
    k, v = _gather_keys_and_values(k, v, layout, context_group)
    q, k, v = (aligned(x).transpose(1, 2) for x in (q, k, v))
    documents = layout.documents()
    length = layout.chunk_length
    outputs = []
    for i, chunk in enumerate(layout.chunks):
        end = (chunk + 1) * length
        queries, keys, values = q[:, :, i * length : (i + 1) * length], k[:, :, :end], v[:, :, :end]
        if documents is None:
            outputs.append(causal(queries, keys, values, scale, backend))
        else:
            outputs.append(_causal_in_documents(queries, keys, values, scale, layout, documents[:, :end]))
    return joined(outputs)


def _over_shares_of_heads(
    q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, scale: float, group: ProcessGroup, backend: str
) -> Tensor:
    """A share of the query heads is that of the keys and values they use, since both are cut in order."""
    q, k, v = (heads_from_sequence(x, layout, group) for x in (q, k, v))
    whole = layout.once("whole samples", lambda: SequenceLayout(layout.context, document_starts=layout.document_starts))
    return sequence_from_heads(causal_attention(q, k, v, whole, scale, None, backend=backend), layout, group)


def _gather_keys_and_values(k: Tensor, v: Tensor, layout: SequenceLayout, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole sample in sequence order; the backward pass sums each rank's share of their gradients."""
    if layout.size == 1:
        return k, v
    both = torch.cat((k, v), dim=-1).transpose(0, 1).contiguous()
    whole = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=group)
    pieces = whole.split(layout.chunk_length, dim=0)
    ordered = torch.cat([pieces[place] for place in gathered_order(layout.size)], dim=0).transpose(0, 1)
    return ordered.split((k.shape[-1], v.shape[-1]), dim=-1)


def _causal_in_documents(q: Tensor, k: Tensor, v: Tensor, scale: float, layout: SequenceLayout, documents: Tensor) -> Tensor:
    """As `causal`, within documents; documents [b, keys] numbers each key's document."""
    queries, keys = q.shape[2], k.shape[2]
    if q.is_cuda:
        return flex(q, k, v, layout.once(("blocks", queries, keys), lambda: document_blocks(documents, queries)), scale)
    offset = keys - queries
    position = torch.arange(keys, device=q.device)
    mask = position[offset:, None] >= position[None]
    mask = mask & (documents[:, offset:, None] == documents[:, None, :])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=scale, enable_gqa=q.shape[1] != k.shape[1])
