"""Megatron's indexed dataset (`.bin` and `.idx`), written and read with numpy alone.

`.bin` holds the tokens, little-endian, documents back to back. `.idx`: magic, u64 version, u8 dtype code, u64 sequences S, u64 length of
the document index D, i32[S] lengths (tokens), i64[S] offsets into `.bin` (bytes), i64[D] document index. One document is one sequence here.
"""

import hashlib
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hybrid_megatron.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPE_CODES = {"uint16": 8, "int32": 4}
# megatron-core's own border: its reader derives nothing from it, but its writer would choose the same type.
UINT16_VOCAB_LIMIT = 65500
HEADER_BYTES = len(MAGIC) + 8 + 1 + 8 + 8
_CHUNK_DOCUMENTS = 1 << 20
_CHUNK_TOKENS = 1 << 24


def token_dtype(vocab_size: int) -> np.dtype:
    """The token type for a vocabulary of `vocab_size` words: uint16 below 65,500, else int32."""
    return np.dtype("<u2") if vocab_size < UINT16_VOCAB_LIMIT else np.dtype("<i4")


def idx_size(documents: int) -> int:
    """Bytes of the `.idx` of a dataset with `documents` documents."""
    return HEADER_BYTES + 4 * documents + 8 * documents + 8 * (documents + 1)


@dataclass(frozen=True)
class WrittenDataset:
    """What `IndexedDatasetWriter.finish` wrote. Sizes in bytes, hashes as lower-case hex."""

    documents: int
    tokens: int
    dtype: str
    bin_bytes: int
    idx_bytes: int
    bin_sha256: str
    idx_sha256: str


class _HashedFile:
    """A file being written, hashed and counted on the way."""

    def __init__(self, path: Path):
        self.file: BinaryIO = open(path, "wb", buffering=1 << 20)
        self.sha256 = hashlib.sha256()
        self.bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self.sha256.update(data)
        self.bytes += len(data)

    def close(self) -> None:
        """Close after the data has reached the disk, so that a rename cannot overtake it."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


class IndexedDatasetWriter:
    """Appends documents to a `.bin` and writes the `.idx` at the end. Holds four bytes of memory a document."""

    def __init__(self, bin_path: Path, idx_path: Path, dtype: np.dtype):
        self._dtype = dtype
        self._idx_path = idx_path
        self._bin = _HashedFile(bin_path)
        self._lengths = array("i")
        self.tokens = 0

    @property
    def documents(self) -> int:
        return len(self._lengths)

    def add(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append one document of at least one token."""
        self.add_many(np.asarray(tokens, self._dtype), [len(tokens)])

    def add_many(self, tokens: np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """Append documents that lie back to back in `tokens` [sum(lengths)], of this dataset's type."""
        lengths = np.asarray(lengths, np.int32)
        assert tokens.dtype == self._dtype and tokens.shape == (lengths.sum(dtype=np.int64),) and (lengths > 0).all()
        self._bin.write(tokens.tobytes())
        self._lengths.frombytes(lengths.tobytes())
        self.tokens += len(tokens)

    def finish(self) -> WrittenDataset:
        """Close the `.bin`, write the `.idx` and return what was written."""
        self._bin.close()
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.zeros(0, np.int32)
        assert int(lengths.sum(dtype=np.int64)) == self.tokens
        idx = _HashedFile(self._idx_path)
        name = self._dtype.name
        idx.write(MAGIC + struct.pack("<QBQQ", VERSION, DTYPE_CODES[name], len(lengths), len(lengths) + 1))
        chunks = [lengths[start : start + _CHUNK_DOCUMENTS] for start in range(0, len(lengths), _CHUNK_DOCUMENTS)]
        for chunk in chunks:
            idx.write(chunk.astype("<i4").tobytes())
        offset = 0
        for chunk in chunks:
            ends = offset + np.cumsum(chunk, dtype=np.int64) * self._dtype.itemsize
            idx.write(np.concatenate([[offset], ends[:-1]]).astype("<i8").tobytes())
            offset = int(ends[-1])
        for start in range(0, len(lengths) + 1, _CHUNK_DOCUMENTS):
            idx.write(np.arange(start, min(start + _CHUNK_DOCUMENTS, len(lengths) + 1), dtype="<i8").tobytes())
        idx.close()
        assert idx.bytes == idx_size(len(lengths))
        hashes = self._bin.sha256.hexdigest(), idx.sha256.hexdigest()
        return WrittenDataset(len(lengths), self.tokens, name, self._bin.bytes, idx.bytes, *hashes)

    def close(self) -> None:
        """Give the files up without finishing them."""
        self._bin.file.close()


class IndexedDataset:
    """A dataset read back: `lengths` i32 [documents], and document `i` as an array of tokens.

    Raises `DataError` where the two files do not fit each other, which Megatron's own reader does not check.
    """

    def __init__(self, prefix: Path):
        self.bin_path, self.idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        try:
            with self.idx_path.open("rb") as file:
                header = file.read(HEADER_BYTES)
            bin_bytes, idx_bytes = self.bin_path.stat().st_size, self.idx_path.stat().st_size
        except OSError as error:
            raise DataError(
                f"{prefix}: the dataset cannot be read ({error.strerror}: {error.filename}); name it without .bin or .idx"
            ) from None
        if header[: len(MAGIC)] != MAGIC or len(header) < HEADER_BYTES:
            raise DataError(f"{self.idx_path}: not the index of a Megatron dataset; build it again with `python -m data_prep tokenize`")
        version, code, sequences, document_index = struct.unpack("<QBQQ", header[len(MAGIC) :])
        names = {code: name for name, code in DTYPE_CODES.items()}
        if version != VERSION or code not in names or document_index != sequences + 1 or idx_bytes != idx_size(sequences):
            raise DataError(
                f"{self.idx_path}: version {version}, type {code}, {sequences} sequences, {document_index - 1} documents, {idx_bytes} "
                "bytes; what is read here has one sequence a document, of uint16 or int32: build it with `python -m data_prep tokenize`"
            )
        self.dtype = np.dtype(names[code]).newbyteorder("<")
        self.lengths = np.memmap(self.idx_path, "<i4", "r", HEADER_BYTES, (sequences,)) if sequences else np.zeros(0, "<i4")
        tokens = int(self.lengths.sum(dtype=np.int64))
        if bin_bytes != tokens * self.dtype.itemsize:
            raise DataError(
                f"{self.bin_path}: {bin_bytes} bytes, but its index counts {tokens} tokens of {self.dtype.itemsize} bytes; "
                "one of the two files is damaged or belongs to another dataset: build them again"
            )
        self.tokens = np.memmap(self.bin_path, self.dtype, "r") if tokens else np.zeros(0, self.dtype)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, document: int) -> np.ndarray:
        return self.tokens[self.starts[document] : self.starts[document + 1]]

    def runs(self, chosen: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The documents where `chosen` (bool [documents]) is true, as few large pieces of (tokens, lengths), in order."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]])))
        for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            while first < last:
                stop = int(np.searchsorted(self.starts, self.starts[first] + _CHUNK_TOKENS, "right")) - 1
                stop = min(last, max(first + 1, stop))
                yield self.tokens[self.starts[first] : self.starts[stop]], self.lengths[first:stop]
                first = stop
