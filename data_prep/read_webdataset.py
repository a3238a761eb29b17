"""Reader of tar shards as the webdataset library writes them: members that share a key, the name up to its first dot, are one record.

The library itself is not used, as it imports torch. Nothing is ever unpacked to disk.
"""

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.compression import LONGEST_LINE
from data_prep.readers import parse_object
from data_prep.records import Raw, Reject
from hybrid_megatron.errors import DataError

_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
_META = re.compile(r"__[^/]*__($|/)")
_END = bytes(1024)


class _Stream:
    """Chunks as the file that tarfile reads, remembering the last 1,024 bytes: an archive ends with as many zeros."""

    def __init__(self, chunks: Iterator[bytes]):
        self._chunks, self._pending, self.tail = chunks, bytearray(), b""

    def read(self, size: int) -> bytes:
        while len(self._pending) < size and (chunk := next(self._chunks, b"")):
            self._pending += chunk
        data = bytes(self._pending[:size])
        del self._pending[:size]
        self.tail = (self.tail + data)[-len(_END) :]
        return data


def read_webdataset(file: str, chunks: Iterator[bytes], text_keys: tuple[str, ...]) -> Iterator[Raw | Reject]:
    """A record for each run of members with one key.

    Its fields are the members by extension, those of `text_keys` as bytes, and those of the object in its `json`
    member. `Raw.line` is the number of its first member. Members with other extensions (images) are passed over, members that point
    outside the archive or are no files are rejected. Raises `DataError` for an archive that is damaged or cut off.
    """
    stream = _Stream(chunks)
    current: _Sample | None = None
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
            for number, member in enumerate(archive, start=1):
                archive.members = []  # it would remember every member
                problem = _problem(member)
                if problem is not None:
                    yield Reject(file, number, *problem)
                    continue
                match = _NAME.fullmatch(member.name)
                if match is None or not member.isfile() or _META.match(member.name):
                    continue
                key, extension = match[1], match[2].lower()
                if current is None or current.key != key:
                    if current is not None:
                        yield from current.record(file)
                    current = _Sample(key, number)
                wanted = extension == "json" or extension in text_keys
                content = archive.extractfile(member) if wanted else None
                current.add(file, number, extension, None if content is None else content.read())
            while rest := archive.fileobj.read(1 << 16):
                if rest.strip(b"\0"):  # tarfile takes a damaged header for the end
                    raise DataError(f"{file} is damaged (tar: no header where one should be); fetch it again or leave it out")
    except tarfile.TarError as error:
        raise DataError(f"{file} is damaged or cut off (tar: {error}); fetch it again or leave it out") from None
    if stream.tail != _END:
        raise DataError(f"{file} is cut off: the tar archive has no end; fetch it again or leave it out")
    if current is not None:
        yield from current.record(file)


class _Sample:
    def __init__(self, key: str, line: int):
        self.key, self.line = key, line
        self.members: dict[str, Any] = {}
        self.json: dict[str, Any] = {}
        self.problem: Reject | None = None

    def add(self, file: str, number: int, extension: str, data: bytes | None) -> None:
        """A member; `data` is None where it is passed over."""
        if extension in self.members:
            self.problem = Reject(file, number, "duplicate_name", f"{self.key}.{extension} comes twice")
        self.members[extension] = data
        if extension == "json" and data is not None:
            parsed = parse_object(file, number, data)
            if isinstance(parsed, Reject):
                self.problem = parsed
            else:
                self.members[extension] = self.json = dict(parsed.fields)

    def record(self, file: str) -> Iterator[Raw | Reject]:
        """The record, or what is wrong with it."""
        yield self.problem or Raw(self.line, self.json | self.members)


def _problem(member: tarfile.TarInfo) -> tuple[str, str] | None:
    if Path(member.name).is_absolute() or ".." in Path(member.name).parts:
        return "unsafe_name", f"{member.name} points outside the archive"
    if not member.isfile() and not member.isdir():
        return "not_a_file", f"{member.name} is a link or a device"
    if member.size > LONGEST_LINE:
        return "too_long", f"{member.name} has more than {LONGEST_LINE:,} bytes"
    return None
