"""Parts, one after the other, into one dataset: read and written in pieces, so that memory does not grow with the dataset."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from data_prep.indexed_dataset import HEADER_BYTES, IndexedDatasetWriter, WrittenDataset
from data_prep.manifest import Manifest
from data_prep.progress import Progress
from hybrid_megatron.errors import DataError

PIECE_DOCUMENTS = 1 << 16
PIECE_TOKENS = 1 << 21


def join_parts(parts: Sequence[tuple[Path, Manifest]], bin_path: Path, idx_path: Path, keep_parts: bool) -> WrittenDataset:
    """Write the documents of all parts, prefixes with their manifests, in order. A single part is moved unless it is to be kept.

    Raises `DataError` for a part that is not what its manifest says.
    """
    first = parts[0][1]
    if len(parts) == 1 and not keep_parts:
        for suffix, path in ((".bin", bin_path), (".idx", idx_path)):
            os.replace(f"{parts[0][0]}{suffix}", path)
        return WrittenDataset(**{key: getattr(first, key) for key in WrittenDataset.__dataclass_fields__})
    progress = Progress("join", sum(manifest.bin_bytes for _, manifest in parts))
    dtype = np.dtype(first.dtype).newbyteorder("<")
    writer = IndexedDatasetWriter(bin_path, idx_path, dtype)
    try:
        for prefix, manifest in parts:
            digest = hashlib.sha256()
            for tokens, lengths in _pieces(prefix, dtype, manifest.documents):
                digest.update(tokens)
                writer.add_many(tokens, lengths)
                progress.update(writer.tokens * dtype.itemsize, writer.documents, writer.tokens)
            if digest.hexdigest() != manifest.bin_sha256:
                raise DataError(f"{prefix}.bin is damaged: its SHA-256 is not the one in its manifest; remove it and run the command again")
        return writer.finish()
    finally:
        writer.close()
        progress.close()


def _pieces(prefix: Path, dtype: np.dtype, documents: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens and lengths of some documents at a time."""
    with open(f"{prefix}.idx", "rb") as index, open(f"{prefix}.bin", "rb") as tokens:
        index.seek(HEADER_BYTES)
        for start in range(0, documents, PIECE_DOCUMENTS):
            lengths = np.frombuffer(index.read(4 * min(PIECE_DOCUMENTS, documents - start)), "<i4")
            piece = np.cumsum(lengths, dtype=np.int64) // PIECE_TOKENS
            for some in np.split(lengths, np.flatnonzero(np.diff(piece)) + 1):
                data = tokens.read(int(some.sum(dtype=np.int64)) * dtype.itemsize)
                yield np.frombuffer(data, dtype), some
