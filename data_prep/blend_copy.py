"""Copying documents from several datasets in any order: many reads at a time, each thread going forward through the files."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from data_prep.indexed_dataset import PIECE_TOKENS, IndexedDataset, IndexedDatasetWriter, WrittenDataset
from data_prep.progress import Progress
from hybrid_megatron.errors import DataError

THREADS = 16  # reads in flight: what hides the delay of a network file system
BATCH_DOCUMENTS = 1 << 16


def copy_documents(
    datasets: Sequence[IndexedDataset], sources: np.ndarray, documents: np.ndarray, lengths: np.ndarray, bin_path: Path, idx_path: Path
) -> WrittenDataset:
    """Write the first `lengths[i]` tokens of document `documents[i]` of `datasets[sources[i]]`, for each i in order."""
    itemsize = datasets[0].dtype.itemsize
    writer = IndexedDatasetWriter(bin_path, idx_path, datasets[0].dtype)
    progress = Progress("blend", int(lengths.sum(dtype=np.int64)) * itemsize)
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(dataset.open_tokens()) for dataset in datasets]
            pool = stack.enter_context(ThreadPoolExecutor(THREADS))
            for first, last in _batches(lengths):
                source, wanted = sources[first:last], lengths[first:last].astype(np.int64)
                offsets = np.zeros(last - first, np.int64)
                for number, dataset in enumerate(datasets):
                    offsets[source == number] = dataset.offsets(documents[first:last][source == number])
                tokens = np.empty(int(wanted.sum()), datasets[0].dtype)
                starts = (np.cumsum(wanted) - wanted) * itemsize
                order = np.lexsort((offsets, source))
                reads = np.column_stack([source, offsets, starts, starts + wanted * itemsize])[order]
                target = memoryview(tokens).cast("B")
                for _ in pool.map(lambda share, target=target: _read_all(files, share, target), np.array_split(reads, THREADS)):
                    pass  # raises what a thread raised
                writer.add_many(tokens, wanted)
                progress.update(writer.tokens * itemsize, writer.documents, writer.tokens)
        return writer.finish()
    finally:
        progress.close()
        writer.close()


def _batches(lengths: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges of documents, each of about `PIECE_TOKENS` tokens."""
    ends = np.cumsum(lengths, dtype=np.int64)
    first = 0
    while first < len(lengths):
        done = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, done + PIECE_TOKENS, "right")))
        last = min(last, first + BATCH_DOCUMENTS)
        yield first, last
        first = last


def _read_all(files: Sequence, reads: np.ndarray, target: memoryview) -> None:
    for source, offset, start, stop in reads.tolist():
        file = files[source]
        while start < stop:
            try:
                count = os.preadv(file.fileno(), [target[start:stop]], offset)
            except OSError as error:
                raise DataError(f"{file.name} cannot be read ({error.strerror}); check the file") from None
            if count == 0:
                raise DataError(f"{file.name} ends before its index does; build the dataset again")
            start, offset = start + count, offset + count
