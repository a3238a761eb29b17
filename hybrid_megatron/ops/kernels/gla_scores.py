"""Scores between the tokens of a chunk under gates of each channel, and what their gradient gives to queries and keys, as products.

    A_ij = scale * sum_k q_ik k_jk 2^(G_ik - G_jk)    for j <= i, G the sums of a chunk's log gates to the base 2

2^(G_i - G_j) is 2^(G_i - G_m) 2^(G_m - G_j) with the chunk's middle token m, so that a chunk takes one product where
flash-linear-attention's kernels go through a part of it token by token. Where gates are so strong that the factors could leave float32, the
scores of those channels are summed token by token: exact for all gates <= 0. Shapes and meaning of arguments are those of
fla/ops/gla/chunk.py (0.6.0), chunk_gla_fwd_intra_gk and chunk_gla_bwd_dqk_intra, in whose places these stand.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_FARTHEST = tl.constexpr(60.0)
"""From the middle token's sum to any other's, in powers of two. float32 has 126: gradients down to 2^-66 keep their place."""
_TILE = {"CHANNELS": 32, "num_warps": 4}
"""The fastest of 9 for the gradients on an H200, 12 heads of 128; for the scores it takes 0.195 ms, the best 0.165."""


@triton.jit
def _place(cu_seqlens, chunk_indices, length, CHUNK: tl.constexpr, HEADS: tl.constexpr, SEQUENCES: tl.constexpr):
    """(head, first token of the sequence, first token of the chunk in it, tokens in the chunk); programs over chunks, samples x heads."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    begin = head // HEADS * length
    if SEQUENCES:
        sequence, chunk = tl.load(chunk_indices + chunk * 2).to(tl.int64), tl.load(chunk_indices + chunk * 2 + 1).to(tl.int64)
        begin = tl.load(cu_seqlens + sequence).to(tl.int64)
        length = tl.load(cu_seqlens + sequence + 1).to(tl.int64) - begin
    return head % HEADS, begin, chunk * CHUNK, tl.minimum(length - chunk * CHUNK, CHUNK)


@triton.jit
def _tile(q, k, g, one_row, channel, token, tokens, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """(where it lies [CHUNK, CHANNELS], which of these places are there, queries, keys, sums of gates, these less the middle one)."""
    inside = (token < tokens)[:, None] & (channel < WIDTH)[None, :]
    at = one_row[None, :] + token[:, None] * (HEADS * WIDTH)
    queries, keys = tl.load(q + at, mask=inside, other=0.0).to(tl.float32), tl.load(k + at, mask=inside, other=0.0).to(tl.float32)
    sums = tl.load(g + at, mask=inside, other=0.0)
    middle = tl.load(g + one_row + (tokens // 2) * (HEADS * WIDTH), mask=channel < WIDTH, other=0.0)
    return at, inside, queries, keys, sums, tl.where(inside, sums - middle[None, :], 0.0)


@triton.jit(do_not_specialize=["length"])
def _gla_scores(
    q, k, g, scores, cu_seqlens, chunk_indices, scale, length,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, CHANNELS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    head, begin, first, tokens = _place(cu_seqlens, chunk_indices, length, CHUNK, HEADS, SEQUENCES)
    token = tl.arange(0, CHUNK)
    row = begin + first
    total = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for tile in range(0, tl.cdiv(WIDTH, CHANNELS)):
        channel = tile * CHANNELS + tl.arange(0, CHANNELS)
        one_row = (row * HEADS + head) * WIDTH + channel
        at, inside, queries, keys, sums, distance = _tile(q, k, g, one_row, channel, token, tokens, HEADS, WIDTH)
        if tl.max(tl.abs(distance)) <= _FARTHEST:
            total = tl.dot(queries * tl.exp2(distance), tl.trans(keys * tl.exp2(-distance)), total)
        else:
            for j in range(0, tokens):
                key = tl.load(k + one_row + j * (HEADS * WIDTH), mask=channel < WIDTH, other=0.0).to(tl.float32)
                sum_j = tl.load(g + one_row + j * (HEADS * WIDTH), mask=channel < WIDTH, other=0.0)
                with_j = tl.sum(queries * key[None, :] * tl.exp2(tl.minimum(sums - sum_j[None, :], 0.0)), axis=1)
                total += tl.where((token == j)[None, :], with_j[:, None], 0.0)
    total = tl.where(token[:, None] >= token[None, :], total * scale, 0.0)
    out = scores + ((row + token)[:, None] * HEADS + head) * CHUNK + token[None, :]
    tl.store(out, total, mask=(token < tokens)[:, None])


@triton.jit(do_not_specialize=["length"])
def _gla_scores_gradients(
    q, k, g, grad, dq, dk, cu_seqlens, chunk_indices, length,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, CHANNELS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Of q and k, without `scale`, which `grad` has."""
    head, begin, first, tokens = _place(cu_seqlens, chunk_indices, length, CHUNK, HEADS, SEQUENCES)
    token = tl.arange(0, CHUNK)
    row = begin + first
    grad += (row * HEADS + head) * CHUNK
    later = (token[:, None] >= token[None, :]) & (token < tokens)[:, None]
    scores = tl.load(grad + token[:, None] * (HEADS * CHUNK) + token[None, :], mask=later, other=0.0)
    for tile in range(0, tl.cdiv(WIDTH, CHANNELS)):
        channel = tile * CHANNELS + tl.arange(0, CHANNELS)
        one_row = (row * HEADS + head) * WIDTH + channel
        at, inside, queries, keys, sums, distance = _tile(q, k, g, one_row, channel, token, tokens, HEADS, WIDTH)
        of_queries = tl.zeros([CHUNK, CHANNELS], dtype=tl.float32)
        of_keys = tl.zeros([CHUNK, CHANNELS], dtype=tl.float32)
        if tl.max(tl.abs(distance)) <= _FARTHEST:
            decay, growth = tl.exp2(distance), tl.exp2(-distance)
            of_queries = tl.dot(scores, keys * growth) * decay
            of_keys = tl.dot(tl.trans(scores), queries * decay) * growth
        else:
            for j in range(0, tokens):
                here = one_row + j * (HEADS * WIDTH)
                sum_j = tl.load(g + here, mask=channel < WIDTH, other=0.0)
                key = tl.load(k + here, mask=channel < WIDTH, other=0.0).to(tl.float32)
                query = tl.load(q + here, mask=channel < WIDTH, other=0.0).to(tl.float32)
                column = tl.load(grad + token * (HEADS * CHUNK) + j, mask=(token >= j) & (token < tokens), other=0.0)
                line = tl.load(grad + j * (HEADS * CHUNK) + token, mask=token <= j, other=0.0)
                of_queries += column[:, None] * key[None, :] * tl.exp2(tl.minimum(sums - sum_j[None, :], 0.0))
                of_keys += line[:, None] * query[None, :] * tl.exp2(tl.minimum(sum_j[None, :] - sums, 0.0))
        tl.store(dq + at, of_queries, mask=inside)
        tl.store(dk + at, of_keys, mask=inside)


def scores(
    q: Tensor, k: Tensor, g: Tensor, scale: float, cu_seqlens: Tensor | None, chunk_size: int, chunk_indices: Tensor | None
) -> Tensor:
    """[b, s, n, chunk_size] float32, zero for the tokens after; q, k [b, s, n, K] and g, the sums [b, s, n, K] float32."""
    batch, length, heads, width = k.shape
    out = q.new_empty(batch, length, heads, chunk_size, dtype=torch.float32)
    grid = (triton.cdiv(length, chunk_size) if cu_seqlens is None else len(chunk_indices), batch * heads)
    _gla_scores[grid](
        q, k, g, out, cu_seqlens, chunk_indices, scale, length,
        HEADS=heads, WIDTH=width, CHUNK=chunk_size, SEQUENCES=cu_seqlens is not None, **_TILE,
    )  # fmt: skip
    return out


def gradients(
    q: Tensor, k: Tensor, g: Tensor, grad: Tensor, cu_seqlens: Tensor | None, chunk_size: int, chunk_indices: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of q and k through the scores, [b, s, n, K] float32, from that of the scores times `scale`."""
    batch, length, heads, width = k.shape
    dq, dk = (torch.empty_like(x, dtype=torch.float32) for x in (q, k))
    grid = (triton.cdiv(length, chunk_size) if cu_seqlens is None else len(chunk_indices), batch * heads)
    _gla_scores_gradients[grid](
        q, k, g, grad, dq, dk, cu_seqlens, chunk_indices, length,
        HEADS=heads, WIDTH=width, CHUNK=chunk_size, SEQUENCES=cu_seqlens is not None, **_TILE,
    )  # fmt: skip
    return dq, dk
