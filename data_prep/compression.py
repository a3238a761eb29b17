"""Input files as a stream of bytes, whether plain, gzip or zstandard (told by their first bytes, not by their names)."""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from hybrid_megatron.errors import DataError

CHUNK_BYTES = 1 << 20
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def read_chunks(path: Path, on_read: Callable[[int], None] = lambda count: None) -> Iterator[bytes]:
    """The decompressed content of `path` in chunks. `on_read` gets the number of bytes read from disk each time.

    Raises `DataError` for a file that cannot be read, is damaged, or ends before its compressed stream does: what is missing from it
    cannot be counted, so it is no matter of single rejected records.
    """
    try:
        with path.open("rb") as file:
            start = file.read(4)
            file.seek(0)
            if start[:2] == _GZIP:
                yield from _decompressed(path, file, on_read, lambda: zlib.decompressobj(wbits=31), "gzip", zlib.error)
            elif start == _ZSTD:
                try:
                    import zstandard
                except ImportError:
                    raise DataError(f"{path} is compressed with zstandard; install it: pip install zstandard==0.25.0") from None
                # Multithreaded or long-distance writers use windows above the default limit.
                decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
                yield from _decompressed(path, file, on_read, decompressor.decompressobj, "zstandard", zstandard.ZstdError)
            elif not start and path.suffix in (".gz", ".zst"):
                raise DataError(f"{path} is empty, not even a {path.suffix} header is there; fetch it again or leave it out")
            else:
                while chunk := file.read(CHUNK_BYTES):
                    on_read(len(chunk))
                    yield chunk
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); check the file or leave it out") from None


def _decompressed(
    path: Path, file: BinaryIO, on_read: Callable[[int], None], new_stream: Callable, name: str, failure: type[Exception]
) -> Iterator[bytes]:
    """Decompress all frames of a file one after the other; both formats may hold several."""
    stream, begun, data = new_stream(), False, b""
    while True:
        if not data:
            data = file.read(CHUNK_BYTES)
            on_read(len(data))
        if not data:
            break
        if not begun and not data.strip(b"\0"):  # padding after the last frame, as tape-minded tools write
            data = b""
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
        if content:
            yield content
    if begun:
        raise DataError(f"{path} is cut off: its {name} stream has no end; fetch it again or leave it out")


def read_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Cut a stream of bytes into lines without their line feeds."""
    pending: list[bytes] = []
    for chunk in chunks:
        *whole, rest = chunk.split(b"\n")
        for part in whole:
            pending.append(part)
            yield b"".join(pending)
            pending.clear()
        if rest:
            pending.append(rest)
    if pending:
        yield b"".join(pending)
