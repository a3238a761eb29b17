"""Input files as a stream of bytes, whether plain, gzip, zstandard or bzip2 (told by their first bytes, not by their names)."""

import bz2
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from hybrid_megatron.errors import DataError

CHUNK_BYTES = 1 << 18  # small, since a chunk of a compressed file may hold a thousand times its size
LONGEST_LINE = 1 << 30
"""Bytes; a longer line is no record of a corpus, and has to fit into memory several times over."""

STANDARD_INPUT = Path("-")
COMPRESSED_SUFFIXES = ("", ".gz", ".zst", ".bz2")
_GZIP, _ZSTD, _BZIP2 = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh"


def read_chunks(path: Path, on_read: Callable[[bytes], None] = lambda data: None) -> Iterator[bytes]:
    """The decompressed content of `path` in chunks, standard input where that is `-`. `on_read` gets the bytes as they lie on disk.

    Raises `DataError` for a file that cannot be read, is damaged, or ends before its compressed stream does: what is missing from it
    cannot be counted, so it is no matter of single rejected records.
    """
    try:
        if path == STANDARD_INPUT:
            yield from _content(path, sys.stdin.buffer, on_read)
        else:
            with path.open("rb") as file:
                yield from _content(path, file, on_read)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); check the file or leave it out") from None


def _content(path: Path, file: BinaryIO, on_read: Callable[[bytes], None]) -> Iterator[bytes]:
    def blocks() -> Iterator[bytes]:
        while data := file.read(CHUNK_BYTES):
            on_read(data)
            yield data

    data = blocks()
    first = next(data, b"")
    if first[:2] == _GZIP:
        yield from _decompressed(path, first, data, lambda: zlib.decompressobj(wbits=31), "gzip", zlib.error)
    elif first[:4] == _ZSTD:
        try:
            import zstandard
        except ImportError:
            raise DataError(f"{path} is compressed with zstandard; install it: pip install zstandard==0.25.0") from None
        # Multithreaded or long-distance writers use windows above the default limit.
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        yield from _decompressed(path, first, data, decompressor.decompressobj, "zstandard", zstandard.ZstdError)
    elif first[:3] == _BZIP2 and first[3:4].isdigit():
        yield from _decompressed(path, first, data, bz2.BZ2Decompressor, "bzip2", OSError)
    elif not first and path.suffix in COMPRESSED_SUFFIXES[1:]:
        raise DataError(f"{path} is empty, not even a {path.suffix} header is there; fetch it again or leave it out")
    elif first:
        yield first
        yield from data


def _decompressed(
    path: Path, data: bytes, more: Iterator[bytes], new_stream: Callable, name: str, failure: type[Exception]
) -> Iterator[bytes]:
    """Decompress all frames of a file one after the other; every format may hold several."""
    stream, begun = new_stream(), False
    while data:
        if not begun and not data.strip(b"\0"):  # padding after the last frame, as tape-minded tools write
            data = next(more, b"")
            continue
        begun = True
        try:
            content = stream.decompress(data)
        except failure as error:
            raise DataError(f"{path} is damaged ({name}: {error}); fetch it again or leave it out") from None
        data = b""
        if stream.eof:
            data, begun = stream.unused_data, False
            stream = new_stream()
        data = data or next(more, b"")
        if content:
            yield content
    if begun:
        raise DataError(f"{path} is cut off: its {name} stream has no end; fetch it again or leave it out")


def read_lines(chunks: Iterator[bytes], longest: int = LONGEST_LINE) -> Iterator[bytes | None]:
    """Cut a stream of bytes into lines without their line feeds; None stands for a line of more than `longest` bytes."""
    pending: list[bytes] = []
    size = 0

    def line() -> bytes | None:
        whole = None if size > longest else b"".join(pending)
        pending.clear()
        return whole

    for chunk in chunks:
        *whole, rest = chunk.split(b"\n")
        for part in whole:
            size += len(part)
            pending.append(part)
            yield line()
            size = 0
        size += len(rest)
        if size > longest:
            pending.clear()
        elif rest:
            pending.append(rest)
    if size:
        yield line()
