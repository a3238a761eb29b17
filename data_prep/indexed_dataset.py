"""Megatron's indexed dataset (`.bin` and `.idx`), written and read with numpy alone.

`.bin` holds the tokens, little-endian, documents back to back. `.idx`: magic, u64 version, u8 dtype code, u64 sequences S, u64 length of
the document index D, i32[S] lengths (tokens), i64[S] offsets into `.bin` (bytes), i64[D] document index. One document is one sequence here.
"""

import hashlib
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
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
# Whatever reads or writes a whole dataset holds so much of it at a time.
PIECE_DOCUMENTS = 1 << 20
PIECE_TOKENS = 1 << 22


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


def write_index(path: Path, dtype: np.dtype, documents: int, lengths: Callable[[], Iterable[np.ndarray]]) -> tuple[int, str]:
    """Write an `.idx` of `documents` documents; returns its size in bytes and its SHA-256.

    `lengths()` yields their lengths in tokens, i32, in pieces, the same ones twice: nothing is held for all documents at once.
    """
    idx = _HashedFile(path)
    idx.write(MAGIC + struct.pack("<QBQQ", VERSION, DTYPE_CODES[dtype.name], documents, documents + 1))
    for piece in lengths():
        idx.write(piece.astype("<i4").tobytes())
    offset = 0
    for piece in lengths():
        ends = offset + np.cumsum(piece, dtype=np.int64) * dtype.itemsize
        idx.write(np.concatenate([[offset], ends[:-1]]).astype("<i8").tobytes())
        offset = int(ends[-1])
    for start in range(0, documents + 1, PIECE_DOCUMENTS):
        idx.write(np.arange(start, min(start + PIECE_DOCUMENTS, documents + 1), dtype="<i8").tobytes())
    idx.close()
    assert idx.bytes == idx_size(documents)
    return idx.bytes, idx.sha256.hexdigest()


class IndexedDatasetWriter:
    """Appends documents to a `.bin` and writes the `.idx` at the end. Lengths wait in a nameless file, so memory does not grow."""

    def __init__(self, bin_path: Path, idx_path: Path, dtype: np.dtype):
        self.dtype = dtype
        self._idx_path = idx_path
        self._bin = _HashedFile(bin_path)
        self._lengths = tempfile.TemporaryFile(dir=idx_path.parent)
        self.documents = 0
        self.tokens = 0

    def add(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append one document of at least one token."""
        self.add_many(np.asarray(tokens, self.dtype), [len(tokens)])

    def add_many(self, tokens: np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """Append documents that lie back to back in `tokens` [sum(lengths)], of this dataset's type."""
        lengths = np.asarray(lengths, "<i4")
        assert tokens.dtype == self.dtype and tokens.shape == (lengths.sum(dtype=np.int64),) and (lengths > 0).all()
        self._bin.write(tokens.tobytes())
        self._lengths.write(lengths.tobytes())
        self.documents += len(lengths)
        self.tokens += len(tokens)

    def finish(self) -> WrittenDataset:
        """Close the `.bin`, write the `.idx` and return what was written."""
        self._bin.close()
        idx_bytes, idx_sha256 = write_index(self._idx_path, self.dtype, self.documents, self._written_lengths)
        self._lengths.close()
        hashes = self._bin.sha256.hexdigest(), idx_sha256
        return WrittenDataset(self.documents, self.tokens, self.dtype.name, self._bin.bytes, idx_bytes, *hashes)

    def close(self) -> None:
        """Give the files up without finishing them."""
        self._bin.file.close()
        self._lengths.close()

    def _written_lengths(self) -> Iterator[np.ndarray]:
        self._lengths.seek(0)
        while data := self._lengths.read(4 * PIECE_DOCUMENTS):
            yield np.frombuffer(data, "<i4")


class IndexedDataset:
    """A dataset read back: `lengths` i32 [documents], `tokens` (both stay on disk), and document `i` as an array of tokens.

    Raises `DataError` where the two files do not fit each other, which Megatron's own reader does not check. Without `check` only the
    index's header and size are looked at, and `problems` says what else is wrong.
    """

    def __init__(self, prefix: Path, check: bool = True):
        self.bin_path, self.idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        try:
            with self.idx_path.open("rb") as file:
                header = file.read(HEADER_BYTES)
            self.bin_bytes, idx_bytes = self.bin_path.stat().st_size, self.idx_path.stat().st_size
        except OSError as error:
            inside = sorted(Path(prefix).glob("*.idx"))
            way_out = f"in this folder there is {inside[0].with_suffix('')}" if inside else "name it without .bin or .idx"
            raise DataError(f"{prefix}: the dataset cannot be read ({error.strerror}: {error.filename}); {way_out}") from None
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
        self._documents = sequences
        for problem in self.problems() if check else ():
            raise DataError(f"{problem}; one of the two files is damaged or belongs to another dataset: build them again")
        self.lengths = self._mapped(self.idx_path, "<i4", HEADER_BYTES, sequences)
        self._pointers = self._mapped(self.idx_path, "<i8", HEADER_BYTES + 4 * sequences, sequences)
        self.tokens = self._mapped(self.bin_path, self.dtype, 0, self.bin_bytes // self.dtype.itemsize)

    def __len__(self) -> int:
        return self._documents

    def __getitem__(self, document: int) -> np.ndarray:
        start = int(self._pointers[document]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[document])]

    def offsets(self, documents: np.ndarray) -> np.ndarray:
        """Where these documents begin in the `.bin`, in bytes."""
        return self._pointers[documents]

    def open_tokens(self) -> BinaryIO:
        """The `.bin`, unbuffered."""
        try:
            return self.bin_path.open("rb", buffering=0)
        except OSError as error:
            raise DataError(f"{self.bin_path} cannot be read ({error.strerror}); check the file") from None

    def problems(self) -> Iterator[str]:
        """Where lengths, offsets, document index and the size of the `.bin` contradict each other; of each kind, the first place."""
        found: dict[str, str] = {}
        first = offset = 0
        for lengths, offsets, borders in self._index_pieces():
            ends = offset + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            numbers = np.arange(first, first + len(lengths))
            for what, wrong, values in (
                ("a length of {} tokens", lengths < 1, lengths),
                ("an offset of {} bytes, which is not where the one before it ends", offsets != np.append(offset, ends[:-1]), offsets),
                ("the entry {} in the document index, which should be its number", borders != numbers, borders),
            ):
                if what not in found and wrong.any():
                    at = int(np.argmax(wrong))
                    found[what] = f"{self.idx_path}: document {first + at} has {what.format(values[at])}"
            first, offset = first + len(lengths), int(ends[-1])
        yield from found.values()
        if int(_read(self.idx_path, "<i8", 1, idx_size(self._documents) - 8)[0]) != self._documents:
            yield f"{self.idx_path}: its document index does not end with the number of documents, {self._documents}"
        if self.bin_bytes != offset:
            tokens = offset // self.dtype.itemsize
            yield f"{self.bin_path}: {self.bin_bytes} bytes, but its index counts {tokens} tokens of {self.dtype.itemsize} bytes"

    def length_pieces(self) -> Iterator[np.ndarray]:
        """The lengths of all documents in order, i32, a piece at a time."""
        for first, count in self._blocks():
            yield _read(self.idx_path, "<i4", count, HEADER_BYTES + 4 * first)

    def pieces(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All documents in order as (tokens, lengths), about `PIECE_TOKENS` at a time, read from the file as they are asked for."""
        offset = 0
        for lengths in self.length_pieces():
            starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            first = 0
            while first < len(lengths):
                last = max(first + 1, int(np.searchsorted(starts, starts[first] + PIECE_TOKENS, "right")) - 1)
                tokens = int(starts[last] - starts[first])
                yield _read(self.bin_path, self.dtype, tokens, offset + int(starts[first]) * self.dtype.itemsize), lengths[first:last]
                first = last
            offset += int(starts[-1]) * self.dtype.itemsize

    def _blocks(self) -> Iterator[tuple[int, int]]:
        for first in range(0, self._documents, PIECE_DOCUMENTS):
            yield first, min(PIECE_DOCUMENTS, self._documents - first)

    def _index_pieces(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        after_lengths, after_offsets = HEADER_BYTES + 4 * self._documents, HEADER_BYTES + 12 * self._documents
        for (first, count), lengths in zip(self._blocks(), self.length_pieces(), strict=True):
            offsets = _read(self.idx_path, "<i8", count, after_lengths + 8 * first)
            yield lengths, offsets, _read(self.idx_path, "<i8", count, after_offsets + 8 * first)

    @staticmethod
    def _mapped(path: Path, dtype: str | np.dtype, offset: int, count: int) -> np.ndarray:
        return np.memmap(path, dtype, "r", offset, (count,)) if count else np.zeros(0, dtype)


def _read(path: Path, dtype: str | np.dtype, count: int, offset: int) -> np.ndarray:
    """`count` values from a file. Errors are about the input, whatever output is being written meanwhile."""
    try:
        values = np.fromfile(path, dtype, count, offset=offset)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); check the file") from None
    if len(values) != count:
        raise DataError(f"{path} ends before its index does; build the dataset again")
    return values
