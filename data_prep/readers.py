"""Readers of lines and of plain text: a file's stream of bytes in, raw records and rejects out."""

import codecs
import json
import re
from collections.abc import Iterator

from data_prep.compression import LONGEST_LINE, read_lines
from data_prep.records import Raw, Reject


def read_jsonl(file: str, chunks: Iterator[bytes]) -> Iterator[Raw | Reject | None]:
    """A record a line. None stands for a blank line between records: nothing is lost there, but it is counted."""
    for number, line in enumerate(read_lines(chunks), start=1):
        if line is None:
            yield _too_long(file, number)
            continue
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line or line.isspace():
            yield None
            continue
        yield parse_object(file, number, line)


def parse_object(file: str, number: int, data: bytes) -> Raw | Reject:
    """One JSON object in UTF-8."""
    try:
        values = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Reject(file, number, "invalid_utf8", f"byte {error.start} of the record: {error.reason}")
    except (ValueError, RecursionError) as error:
        return Reject(file, number, "bad_json", str(error))
    if not isinstance(values, dict):
        return Reject(file, number, "not_an_object", f"found {type(values).__name__}")
    return Raw(number, values)


def read_text(file: str, chunks: Iterator[bytes], split_on: str | None) -> Iterator[Raw | Reject]:
    """A document a file, or one between every two matches of `split_on`; CRLF becomes LF."""
    pieces: list[bytes] = []
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size <= LONGEST_LINE:
            pieces.append(chunk)
        else:
            pieces.clear()
    if size > LONGEST_LINE:
        yield _too_long(file, 1)
        return
    content = b"".join(pieces).removeprefix(codecs.BOM_UTF8)
    pieces.clear()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        yield Reject(file, line, "invalid_utf8", f"byte {error.start} of the file: {error.reason}")
        return
    del content
    text = text.replace("\r\n", "\n")
    if split_on is None or not text.strip():
        yield Raw(1, {"text": text})
        return
    borders, begin = [], 0
    for match in re.finditer(split_on, text, re.MULTILINE):
        borders.append((begin, match.start()))
        begin = match.end()
    line, done = 1, 0
    for first, last in (*borders, (begin, len(text))):
        line += text.count("\n", done, first)
        done = first
        piece = text[first:last]
        if piece.strip():  # nothing between two separators is no document
            yield Raw(line, {"text": piece})


def _too_long(file: str, number: int) -> Reject:
    return Reject(file, number, "too_long", f"more than {LONGEST_LINE:,} bytes")
