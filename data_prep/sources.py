"""Where documents come from: input files of one kind, read as `Record`s and `Reject`s in a fixed order."""

import codecs
import glob
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.compression import read_chunks, read_lines
from data_prep.manifest import sha256_file
from data_prep.progress import Progress
from hybrid_megatron.errors import DataError

SUFFIXES = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "text": (".txt", ".text", ".md"),
}
COMPRESSED_SUFFIXES = ("", ".gz", ".zst")
# What `tokenize` itself writes: never an input, even where the output folder is also the input folder.
REJECT_FILES = ("rejects.jsonl", "rejects.failed.jsonl")


@dataclass(frozen=True)
class Record:
    """One document. `line` is where it begins in its file, counted from 1."""

    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Reject:
    """One record that cannot be used. `reason` is one of a few fixed words, `detail` says more."""

    file: str
    line: int
    reason: str
    detail: str


@dataclass
class Source:
    """Input files of one kind ("jsonl", "text"), in reading order. `records()` counts `bytes_read` and `blank_lines` while it goes."""

    kind: str
    files: list[Path]
    text_keys: tuple[str, ...] = ("text",)
    split_on: str | None = None
    inputs: list[dict[str, Any]] = field(default_factory=list)
    bytes_read: int = 0
    blank_lines: int = 0

    def __post_init__(self) -> None:
        self._states = [_state(path) for path in self.files]

    @property
    def total_bytes(self) -> int:
        return sum(size for size, _ in self._states)

    def describe(self) -> dict[str, Any]:
        """The manifest's `source`; hashes every file, once."""
        if not self.inputs:
            progress = Progress("checking inputs", self.total_bytes)
            done = 0
            for path, (size, _) in zip(self.files, self._states, strict=True):
                try:
                    self.inputs.append({"path": str(path), "bytes": size, "sha256": sha256_file(path)})
                except OSError as error:
                    raise DataError(f"{path} cannot be read ({error.strerror}); check the file or leave it out") from None
                done += size
                progress.update(done)
            progress.close()
        description: dict[str, Any] = {"kind": self.kind, "inputs": self.inputs}
        if self.kind == "jsonl":
            description["text_key"] = ",".join(self.text_keys)
        if self.split_on is not None:
            description["split_on"] = self.split_on
        return description

    def records(self) -> Iterator[Record | Reject]:
        """All records of all files. Raises `DataError` for a file that cannot be read to its end or that changes meanwhile."""
        read: Callable[[Path], Iterator[Record | Reject]] = self._read_jsonl if self.kind == "jsonl" else self._read_text
        for path in self.files:
            yield from read(path)
        for path, state in zip(self.files, self._states, strict=True):
            if _state(path) != state:
                raise DataError(f"{path} was changed while it was read; run the command again when it is complete")

    def _count(self, count: int) -> None:
        self.bytes_read += count

    def _read_jsonl(self, path: Path) -> Iterator[Record | Reject]:
        for number, line in enumerate(read_lines(read_chunks(path, self._count)), start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                self.blank_lines += 1  # between records, so no record is lost; counted all the same
                continue
            yield self._parse(str(path), number, line)

    def _parse(self, file: str, number: int, line: bytes) -> Record | Reject:
        try:
            values = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            return Reject(file, number, "invalid_utf8", f"byte {error.start} of the line: {error.reason}")
        except (ValueError, RecursionError) as error:
            return Reject(file, number, "bad_json", str(error))
        if not isinstance(values, dict):
            return Reject(file, number, "not_an_object", f"found {type(values).__name__}")
        key = next((key for key in self.text_keys if key in values), None)
        if key is None:
            return Reject(file, number, "missing_key", f"none of {', '.join(self.text_keys)} among {', '.join(list(values)[:20])}")
        if not isinstance(values[key], str):
            return Reject(file, number, "not_a_string", f"{key} is {type(values[key]).__name__}")
        return _checked(file, number, values[key])

    def _read_text(self, path: Path) -> Iterator[Record | Reject]:
        content = b"".join(read_chunks(path, self._count)).removeprefix(codecs.BOM_UTF8)
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            line = content[: error.start].count(b"\n") + 1
            yield Reject(str(path), line, "invalid_utf8", f"byte {error.start} of the file: {error.reason}")
            return
        text = text.replace("\r\n", "\n")
        if self.split_on is None:
            yield _checked(str(path), 1, text)
            return
        if not text.strip():
            yield _checked(str(path), 1, text)
            return
        pieces, begin = [], 0
        for match in re.finditer(self.split_on, text, re.MULTILINE):
            pieces.append((begin, match.start()))
            begin = match.end()
        line, done = 1, 0
        for first, last in (*pieces, (begin, len(text))):
            line += text.count("\n", done, first)
            done = first
            piece = text[first:last]
            if piece.strip():  # nothing between two separators is no document
                yield _checked(str(path), line, piece)


def _checked(file: str, line: int, text: str) -> Record | Reject:
    if not text.strip():
        return Reject(file, line, "empty_text", f"{len(text)} characters, all of them white space")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return Reject(file, line, "lone_surrogate", f"U+{ord(text[error.start]):04X} at character {error.start}")
    return Record(file, line, text)


def _state(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); check the file or leave it out") from None
    return status.st_size, status.st_mtime_ns


def open_source(
    kind: str, inputs: Sequence[str], text_key: str | None = None, split_on: str | None = None, output: Path | None = None
) -> Source:
    """Find the files behind `inputs` (files, folders, globs) and return them as a source. Raises `DataError` where nothing is found."""
    if text_key is not None and kind != "jsonl":
        raise DataError(f"--text-key {text_key!r} names a key of JSON records and does not fit --source {kind}; leave one of the two out")
    text_key = "text" if text_key is None else text_key
    keys = tuple(key.strip() for key in text_key.split(",") if key.strip())
    if not keys:
        raise DataError(f"--text-key {text_key!r} names no key; give one or several, as in --text-key text,content")
    if split_on is not None:
        if kind != "text":
            raise DataError(f"--split-on {split_on!r} cuts plain text and does not fit --source {kind}; leave one of the two out")
        try:
            re.compile(split_on)
        except re.error as error:
            raise DataError(f"--split-on {split_on!r} is not a regular expression ({error}); mend it") from None
    return Source(kind, find_files(kind, inputs, output), keys, split_on)


def find_files(kind: str, inputs: Sequence[str], output: Path | None = None) -> list[Path]:
    """Files in the order of `inputs`, sorted within a folder or glob, each once. `output`'s own files are left out of folders."""
    suffixes = tuple(suffix + compressed for suffix in SUFFIXES[kind] for compressed in COMPRESSED_SUFFIXES)
    own = {(output / name).resolve() for name in REJECT_FILES} if output else set()
    found: dict[Path, Path] = {}
    for item in inputs:
        path = Path(item)
        if path.is_dir():
            candidates = (file for file in path.rglob("*") if file.name.endswith(suffixes) and file.is_file())
            visible = (file for file in candidates if not any(part.startswith(".") for part in file.relative_to(path).parts))
            files = sorted(file for file in visible if file.resolve() not in own and not file.name.endswith(".manifest.json"))
            rule = f"holds no file that ends in {', '.join(suffixes)}"
        elif path.exists():
            if not path.is_file():
                raise DataError(f"--input {item} is neither a file nor a folder (a pipe cannot be read twice); write it to a file first")
            files, rule = [path], ""
        else:
            files = sorted(Path(name) for name in glob.glob(item, recursive=True) if Path(name).is_file())
            rule = "matches no file"
        if not files:
            raise DataError(f"--input {item} {rule}; check the path (quote a glob, so that the shell leaves it alone)")
        for file in files:
            found.setdefault(file.resolve(), file)
    return list(found.values())
