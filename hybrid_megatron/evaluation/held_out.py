"""Held-out tokens -> the samples that an evaluation predicts, at any length, and this rank's share of them as batches.

Stream: sample i of length L predicts tokens i L + 1 .. (i + 1) L of the dataset, so two lengths predict the same tokens where one divides
the other. Whole documents: a sample is the beginning of one document, and all lengths take the same documents.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from hybrid_megatron import platform
from hybrid_megatron.data import Batch, TokenStream
from hybrid_megatron.data.vocabulary import check_ids
from hybrid_megatron.errors import DataError
from hybrid_megatron.parallel import ParallelState, SequenceLayout


@dataclass(frozen=True)
class HeldOut:
    """What is predicted, at every length."""

    stream: TokenStream
    longest: int
    """Tokens of the longest samples."""
    whole: int
    """Samples of the longest length."""
    document_begins: np.ndarray | None
    """Where the documents begin that are taken, [whole]; None: one stream."""
    document_mask: bool
    """Whether the model was trained to see the borders of documents."""

    def samples(self, length: int) -> int:
        """Samples of `length` tokens."""
        return self.whole if self.document_begins is not None else self.whole * self.longest // length

    def begin(self, sample: int, length: int) -> int:
        """Place of a sample's first token in the dataset."""
        return int(self.document_begins[sample]) if self.document_begins is not None else sample * length

    def micro_batches(self, length: int, micro_batch: int, state: ParallelState) -> int:
        """Micro-batches of each data rank; the interleaved schedule takes a multiple of the stages."""
        whole = micro_batch * state.data * state.micro_batch_group
        return -(-self.samples(length) // whole) * state.micro_batch_group

    def batches(self, length: int, micro_batch: int, state: ParallelState) -> Iterator[Batch]:
        """This rank's samples of `length` tokens, filled up with samples of weight 0 to whole micro-batches."""
        share = self.micro_batches(length, micro_batch, state) * micro_batch
        first = state.data_rank * share
        for at in range(first, first + share, micro_batch):
            yield self._batch(range(at, at + micro_batch), length, state)

    def _batch(self, samples: range, length: int, state: ParallelState) -> Batch:
        real = [sample < self.samples(length) for sample in samples]
        begins = [self.begin(sample, length) if there else 0 for sample, there in zip(samples, real)]
        rows = np.stack([self.stream.tokens[begin : begin + length + 1] for begin in begins]).astype(np.int64)
        starts = None
        if self.document_mask:
            starts = torch.from_numpy(np.stack([self._starts(begin, length) for begin in begins])).to(platform.device())
        layout = SequenceLayout(length, state.context, state.context_rank, starts)
        weights = torch.tensor(real, dtype=torch.float32)[:, None].expand(-1, length)
        tokens = torch.from_numpy(rows)
        check_ids(tokens, self.stream.words, self.stream.key, self.stream.prefix)
        parts = (layout.local(x).contiguous().to(platform.device()) for x in (tokens[:, :-1], tokens[:, 1:], weights))
        return Batch(*parts, layout)

    def _starts(self, begin: int, length: int) -> np.ndarray:
        """[length] bool: where a document begins, the sample's first token included."""
        borders = self.stream.borders
        inside = borders[np.searchsorted(borders, begin) : np.searchsorted(borders, begin + length)]
        starts = np.zeros(length, bool)
        starts[0] = True
        starts[inside - begin] = True
        return starts


def held_out(stream: TokenStream, longest: int, tokens: int, whole_documents: bool, document_mask: bool) -> HeldOut:
    """As many samples as hold `tokens` tokens at the longest length, at least one. Raises DataError if there is none."""
    asked = max(1, tokens // longest)
    if whole_documents:
        lengths = np.diff(stream.borders)
        fitting = stream.borders[:-1][lengths > longest]
        possible, held = int(lengths.max()) - 1, f"its longest document holds {int(lengths.max()):,}"
    else:
        fitting = None
        possible, held = len(stream.tokens) - 1, f"it holds {len(stream.tokens):,}"
    if possible < longest:
        raise DataError(
            f"{stream.key}: {held} tokens, fewer than the {longest + 1:,} of one sample at the longest of the lengths, {longest}; the "
            f"longest possible is {max(possible, 0)}: set lengths, or give other data"
        )
    there = len(fitting) if whole_documents else possible // longest
    count = min(asked, there)
    return HeldOut(stream, longest, count, None if fitting is None else fitting[:count], document_mask)
