"""The tokens just before each local chunk, from the ranks that hold them: what windows and convolutions need across a cut.

Under the zig-zag, the halo of a chunk lies on other ranks, or on this one (the two middle chunks are neighbours on the last rank), and
over several chunks where it is wider than one. What a rank needs of a chunk is always the end of it, reckoned from the nearest of its own
chunks behind, so a token travels to a rank once, even where both of the rank's chunks want it.
"""

from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_megatron.parallel.sequence_layout import SequenceLayout, chunks_of


def preceding_tokens(x: Tensor, width: int, layout: SequenceLayout, group: ProcessGroup | None) -> tuple[Tensor, ...]:
    """For each local chunk the min(width, chunk's start) tokens before it in the sample, in sequence order: [b, h, ...] each.

    x [b, s, ...], s the local length. One all-to-all, and one more in the backward pass, which adds the gradients of all halos to their
    tokens; none where width is 0 or the sample is whole.
    """
    assert x.shape[1] == layout.local_length, f"{x.shape[1]} tokens under a layout of {layout.local_length}"
    if width == 0 or layout.size == 1:
        return tuple(x[:, :0] for _ in layout.chunks)
    length = layout.chunk_length
    ends = dict(zip(layout.chunks, x.split(length, dim=1))) | _ends_from_other_ranks(x, width, layout, group)

    def before(chunk: int) -> Tensor:
        pieces = [(ends[source], _reach(width, length, source, chunk)) for source in range(chunk)]
        return torch.cat([end[:, end.shape[1] - tokens :] for end, tokens in pieces if tokens] or [x[:, :0]], dim=1)

    return tuple(before(chunk) for chunk in layout.chunks)


def halo_tokens(width: int, layout: SequenceLayout) -> int:
    """Tokens of a sample that this rank receives from other ranks for `preceding_tokens`."""
    return sum(_incoming(width, layout).values())


@lru_cache(maxsize=4096)
def busiest_halo(width: int, context: int, size: int) -> int:
    """Tokens that the busiest of `size` context ranks receives for `preceding_tokens`, of a sample of `context` tokens."""
    return max(halo_tokens(width, SequenceLayout(context, size, rank)) for rank in range(size)) if width else 0


def _reach(width: int, length: int, source: int, chunk: int) -> int:
    """How many tokens of chunk `source`, its last ones, are among the `width` tokens before `chunk`."""
    return min(max(width - (chunk - 1 - source) * length, 0), length)


def _needed(width: int, length: int, source: int, rank: int, size: int) -> int:
    """How many of the last tokens of chunk `source` the halos of `rank` hold."""
    behind = [chunk for chunk in chunks_of(rank, size) if chunk > source]
    return _reach(width, length, source, min(behind)) if behind else 0


def _incoming(width: int, layout: SequenceLayout) -> dict[int, int]:
    """Chunk to the number of its last tokens that this rank receives, in the order in which they arrive."""
    others = [rank for rank in range(layout.size) if rank != layout.rank]
    chunks = [chunk for rank in others for chunk in chunks_of(rank, layout.size)]
    return {chunk: _needed(width, layout.chunk_length, chunk, layout.rank, layout.size) for chunk in chunks}


def _ends_from_other_ranks(x: Tensor, width: int, layout: SequenceLayout, group: ProcessGroup) -> dict[int, Tensor]:
    """Chunk to as many of its last tokens as this rank needs, [b, h, ...]."""
    size, length = layout.size, layout.chunk_length
    incoming = _incoming(width, layout)
    received = [0 if rank == layout.rank else sum(incoming[chunk] for chunk in chunks_of(rank, size)) for rank in range(size)]
    sent: list[list[slice]] = []  # to each rank: places in x
    for rank in range(size):
        needed = [0 if rank == layout.rank else _needed(width, length, chunk, rank, size) for chunk in layout.chunks]
        sent.append([slice(end - tokens, end) for tokens, end in zip(needed, (length, 2 * length)) if tokens])
    arrived = _Exchange.apply(x, sent, received, group).transpose(0, 1)
    return dict(zip(incoming, arrived.split(list(incoming.values()), dim=1)))


class _Exchange(torch.autograd.Function):
    """Places of x [b, s, ...] to other ranks; what arrives from them, [tokens, b, ...], rank after rank."""

    @staticmethod
    def forward(ctx, x: Tensor, sent: list[list[slice]], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.shape, ctx.sent, ctx.received, ctx.group = x.shape, sent, received, group
        places = [place for to_rank in sent for place in to_rank]
        outgoing = torch.cat([x[:, place].transpose(0, 1) for place in places] or [x[:, :0].transpose(0, 1)]).contiguous()
        return _all_to_all(outgoing, _tokens(sent), received, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        returned = _all_to_all(gradient.contiguous(), ctx.received, _tokens(ctx.sent), ctx.group)
        places = [place for to_rank in ctx.sent for place in to_rank]
        whole = gradient.new_zeros(ctx.shape)
        for place, piece in zip(places, returned.split([place.stop - place.start for place in places])):
            whole[:, place] += piece.transpose(0, 1)
        return whole, None, None, None


def _tokens(sent: list[list[slice]]) -> list[int]:
    return [sum(place.stop - place.start for place in to_rank) for to_rank in sent]


def _all_to_all(outgoing: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    incoming = outgoing.new_empty(sum(received), *outgoing.shape[1:])
    dist.all_to_all_single(incoming, outgoing, received, sent, group=group)
    return incoming
