"""Which tokens of a sample this rank holds, and where documents begin.

megatron-core's zig-zag: a sample of `context` tokens is cut into 2 * size chunks; context rank r holds chunk r and chunk 2 * size - 1 - r,
in that order, so that causal attention costs every rank the same. The layout travels with the batch; every mixer gets it.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


_Made = TypeVar("_Made")


@dataclass(frozen=True)
class SequenceLayout:
    """The cut of one micro-batch's samples over `size` context ranks, seen from rank `rank`."""

    context: int
    """Tokens of a whole sample."""
    size: int = 1
    rank: int = 0
    document_starts: Tensor | None = None
    """[b, context] bool over the whole sample: true where a document begins. None: samples are not masked by document."""
    _made: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def local_length(self) -> int:
        """Tokens of a sample on this rank."""
        return self.context // self.size

    @property
    def chunks(self) -> tuple[int, ...]:
        """Global numbers of the chunks this rank holds, in local order. Without context parallelism the sample is one chunk."""
        return chunks_of(self.rank, self.size)

    @property
    def chunk_length(self) -> int:
        return self.local_length // len(self.chunks)

    def positions(self, device: torch.device | str) -> Tensor:
        """[local_length] global position of each local token, 0-based."""
        return _positions(self.context, self.size, self.rank, str(device))

    def local(self, whole: Tensor) -> Tensor:
        """Cut [b, context, ...] to this rank's tokens, [b, local_length, ...]."""
        if self.size == 1:
            return whole
        return torch.cat([whole[:, c * self.chunk_length : (c + 1) * self.chunk_length] for c in self.chunks], dim=1)

    def whole(self, local: Tensor, group: ProcessGroup) -> Tensor:
        """[b, context, ...] of every context rank's [b, local_length, ...]; without gradient, collective over `group`."""
        if self.size == 1:
            return local
        ranks = local.new_empty(self.size * local.shape[0], *local.shape[1:])
        dist.all_gather_into_tensor(ranks, local.contiguous(), group=group)
        chunks = [chunk for rank in ranks.chunk(self.size) for chunk in rank.chunk(2, dim=1)]
        return torch.cat([chunks[place] for place in gathered_order(self.size)], dim=1)

    def once(self, name: Hashable, make: Callable[[], _Made]) -> _Made:
        """What `make` gives, made for the first layer that asks for it and kept for the others of this micro-batch."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def documents(self) -> Tensor | None:
        """[b, context] the number of each token's document in its sample, or None."""
        starts = self.document_starts
        return None if starts is None else self.once("documents", lambda: starts.long().cumsum(1))

    def local_document_starts(self) -> Tensor | None:
        """[b, local_length] bool, or None."""
        starts = self.document_starts
        return None if starts is None else self.once("local document starts", lambda: self.local(starts))


def chunks_of(rank: int, size: int) -> tuple[int, ...]:
    return (0,) if size == 1 else (rank, 2 * size - 1 - rank)


def gathered_order(size: int) -> list[int]:
    """For chunks gathered rank after rank: the place of each global chunk, so `gathered[order]` is in sequence order."""
    held = [chunk for rank in range(size) for chunk in chunks_of(rank, size)]
    return [held.index(chunk) for chunk in range(len(held))]


@lru_cache(maxsize=64)
def _positions(context: int, size: int, rank: int, device: str) -> Tensor:
    layout = SequenceLayout(context, size, rank)
    length = layout.chunk_length
    return torch.cat([torch.arange(c * length, (c + 1) * length, device=device) for c in layout.chunks])
