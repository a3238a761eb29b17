"""FlexAttention's block masks for causal attention within a window, within documents, or both, from the ends of the blocks alone.

torch's create_block_mask would first build the [b, queries, keys] mask.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

_BLOCK = 128  # FlexAttention skips blocks of this many queries and keys


@lru_cache(maxsize=64)
def window_blocks(queries: int, keys: int, window: int, device: str) -> BlockMask:
    """Of the last `queries` places of `keys`, each sees itself and the window - 1 before it. Batch dimension 1; built once a shape."""
    offset = keys - queries

    def visible(b, h, query, key):
        distance = query + offset - key
        return (distance >= 0) & (distance < window)

    (query, last_query), (key, last_key) = _blocks(offset, keys, device)
    some = (key <= last_query) & (query - last_key < window)
    every = (last_key <= query) & (last_query - key < window)
    return _block_mask(some[None], (every & _full(query, last_query))[None], queries, keys, visible)


def document_blocks(documents: Tensor, queries: int, window: int | None = None) -> BlockMask:
    """The same within documents: documents [b, keys] numbers each key's document. Without a window all of the document before is seen.

    Document numbers only rise along a row, so the ends of two blocks tell whether the queries of one see all, some or none of the keys
    of the other.
    """
    keys = documents.shape[1]
    offset, window = keys - queries, window or keys

    def visible(b, h, query, key):
        distance = query + offset - key
        return (distance >= 0) & (distance < window) & (documents[b, query + offset] == documents[b, key])

    (query, last_query), (key, last_key) = _blocks(offset, keys, documents.device)
    some = (key <= last_query) & (query - last_key < window)
    some = some & (documents[:, torch.minimum(last_key, last_query)] >= documents[:, query])
    every = (last_key <= query) & (last_query - key < window) & (documents[:, None, key] == documents[:, last_query])
    return _block_mask(some, every & _full(query, last_query), queries, keys, visible)


def _blocks(offset: int, keys: int, device: torch.device | str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """First and last place of each block of queries, [blocks, 1], and of each block of keys, [blocks]; all places are the keys'."""

    def ends(first: int) -> tuple[Tensor, Tensor]:
        begin = torch.arange(first, keys, _BLOCK, device=device)
        return begin, (begin + _BLOCK - 1).clamp_max(keys - 1)

    query, last_query = ends(offset)
    return (query[:, None], last_query[:, None]), ends(0)


def _full(query: Tensor, last_query: Tensor) -> Tensor:
    """A last block that is not full needs the mask."""
    return last_query - query == _BLOCK - 1


def _block_mask(some: Tensor, every: Tensor, queries: int, keys: int, visible) -> BlockMask:
    """some, every [b, query blocks, key blocks]: pairs of blocks with anything visible, and those with everything."""

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        """[b, 1, query blocks] number of chosen key blocks, and [b, 1, query blocks, key blocks] their places, the chosen ones first."""
        chosen = chosen[:, None].int()
        return chosen.sum(-1, dtype=torch.int32), chosen.argsort(dim=-1, descending=True, stable=True).int()

    return BlockMask.from_kv_blocks(
        *listed(some & ~every), *listed(every), BLOCK_SIZE=_BLOCK, mask_mod=visible, seq_lengths=(queries, keys)
    )
