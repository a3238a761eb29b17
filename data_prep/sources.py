"""Where documents come from: input files of one corpus or one layout, read as `Record`s and `Reject`s in a fixed order."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data_prep.compression import STANDARD_INPUT, read_chunks
from data_prep.filters import Language, MissingField, Where, parse_where
from data_prep.inputs import Shard, find_files, shards_of
from data_prep.manifest import sha256_file
from data_prep.progress import Progress
from data_prep.read_parquet import read_parquet
from data_prep.read_webdataset import read_webdataset
from data_prep.readers import read_jsonl, read_text
from data_prep.records import Raw, Record, Reject, document
from hybrid_megatron.errors import DataError


@dataclass(frozen=True)
class Corpus:
    """How a source is laid out in files (a key of `inputs.SUFFIXES`), where its text stands, and which field holds its language."""

    layout: str
    text_key: str = "text"
    language: str | None = None


CORPORA = {
    "dclm": Corpus("jsonl", language="language_id_whole_page_fasttext"),
    "longwanjuan": Corpus("jsonl", "content,text"),
    "fineweb_edu": Corpus("parquet", language="language"),
    "pg19": Corpus("text"),
    "jsonl": Corpus("jsonl"),
    "parquet": Corpus("parquet"),
    "text": Corpus("text"),
    "webdataset": Corpus("webdataset", "text,content,txt"),
}


@dataclass
class Source:
    """Input files of one corpus, in reading order. `records()` counts while it goes: bytes of the files as they lie on disk, blank lines
    between records, records that `filters` leave out (by filter)."""

    kind: str
    files: list[Path]
    text_keys: tuple[str, ...] = ("text",)
    split_on: str | None = None
    filters: tuple[Where | Language, ...] = ()
    inputs: list[dict[str, Any]] = field(default_factory=list)
    bytes_read: int = 0
    blank_lines: int = 0
    filtered: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._states = [_state(path) for path in self.files]

    @property
    def total_bytes(self) -> int:
        return sum(size for size, _ in self._states)

    def settings(self) -> dict[str, Any]:
        """The manifest's `source` without its inputs."""
        description: dict[str, Any] = {"kind": self.kind}
        if CORPORA[self.kind].layout != "text":
            description["text_key"] = ",".join(self.text_keys)
        if self.split_on is not None:
            description["split_on"] = self.split_on
        if self.filters:
            description["filters"] = [str(one) for one in self.filters]
        return description

    def describe(self) -> dict[str, Any]:
        """The manifest's `source`; hashes every file that `records` has not been through."""
        if not self.inputs:
            if STANDARD_INPUT in self.files:
                raise DataError("--input - can be read only once, and here it is read twice; write it to a file first")
            progress = Progress("checking inputs", self.total_bytes)
            done = 0
            for path, (size, modified) in zip(self.files, self._states, strict=True):
                self.inputs.append(_input(path, size, modified, _sha256(path)))
                done += size
                progress.update(done)
            progress.close()
        return self.settings() | {"inputs": self.inputs}

    def shards(self) -> list[Shard]:
        """The files as units of work: each alone, books together."""
        return shards_of(self.files, [size for size, _ in self._states], grouped=CORPORA[self.kind].layout == "text")

    def of(self, shard: Shard) -> "Source":
        """This source with the files of one shard alone."""
        return replace(self, files=list(shard.files), inputs=[], bytes_read=0, blank_lines=0, filtered={})

    def unchanged(self, inputs: Sequence[dict[str, Any]]) -> bool:
        """Whether the files are what `inputs` of a manifest says: by name, size and time of change, or else by their hashes."""
        if len(inputs) != len(self.files):
            return False
        for path, (size, modified), entry in zip(self.files, self._states, inputs, strict=True):
            if path == STANDARD_INPUT or path.name != Path(entry["path"]).name or size != entry["bytes"]:
                return False
            if modified != entry.get("modified_ns") and _sha256(path) != entry["sha256"]:
                return False
        return True

    def records(self) -> Iterator[Record | Reject]:
        """All records of all files. Raises `DataError` for a file that cannot be read to its end or that changes meanwhile."""
        self.inputs = []
        for path, state in zip(self.files, self._states, strict=True):
            digest = hashlib.sha256()
            before = self.bytes_read
            yield from self._wanted(str(path), self._read(path, state[0], digest))
            if _state(path) != state:
                raise DataError(f"{path} was changed while it was read; run the command again when it is complete")
            self.inputs.append(_input(path, self.bytes_read - before, state[1], digest.hexdigest()))

    def _read(self, path: Path, size: int, digest: Any) -> Iterable[Raw | Reject | None]:
        layout, name, start = CORPORA[self.kind].layout, str(path), self.bytes_read

        def count(data: bytes) -> None:
            digest.update(data)
            self.bytes_read += len(data)

        def reached(part: float) -> None:
            self.bytes_read = start + int(part * size)

        if layout == "parquet":
            for _ in read_chunks(path, digest.update):
                pass
            yield from read_parquet(path, [name for one in self.filters for name in one.fields], self.text_keys, reached)
            reached(1.0)
        elif layout == "jsonl":
            yield from read_jsonl(name, read_chunks(path, count))
        elif layout == "webdataset":
            yield from read_webdataset(name, read_chunks(path, count), self.text_keys)
        else:
            yield from read_text(name, read_chunks(path, count), self.split_on)

    def _wanted(self, file: str, records: Iterable[Raw | Reject | None]) -> Iterator[Record | Reject]:
        for raw in records:
            if raw is None:
                self.blank_lines += 1
            elif isinstance(raw, Reject):
                yield raw
            else:
                try:
                    left_out = next((one for one in self.filters if not one.keeps(raw.fields)), None)
                except MissingField as error:
                    yield Reject(file, raw.line, "missing_field", str(error))
                    continue
                if left_out is None:
                    yield document(file, raw, self.text_keys)
                else:
                    self.filtered[str(left_out)] = self.filtered.get(str(left_out), 0) + 1


def _state(path: Path) -> tuple[int, int]:
    """Size in bytes and time of the last change in nanoseconds; zeros for standard input."""
    if path == STANDARD_INPUT:
        return 0, 0
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); check the file or leave it out") from None
    return status.st_size, status.st_mtime_ns


def _sha256(path: Path) -> str:
    try:
        return sha256_file(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); check the file or leave it out") from None


def _input(path: Path, size: int, modified: int, sha256: str) -> dict[str, Any]:
    return {"path": str(path), "bytes": size, "modified_ns": modified, "sha256": sha256}


def open_source(
    kind: str,
    inputs: Sequence[str],
    text_key: str | None = None,
    split_on: str | None = None,
    output: Path | None = None,
    where: Sequence[Sequence[str]] = (),
    language: str | None = None,
    min_language_score: float = 0.0,
    language_field: str | None = None,
) -> Source:
    """Find the files behind `inputs` and return them as a source; `kind` is a key of CORPORA. Raises `DataError` for what does not fit."""
    corpus = CORPORA[kind]
    if text_key is not None and corpus.layout == "text":
        raise DataError(f"--text-key {text_key!r} names a key of JSON records and does not fit --source {kind}; leave one of the two out")
    text_key = corpus.text_key if text_key is None else text_key
    keys = tuple(key.strip() for key in text_key.split(",") if key.strip())
    if not keys:
        raise DataError(f"--text-key {text_key!r} names no key; give one or several, as in --text-key text,content")
    if split_on is not None:
        if corpus.layout != "text":
            raise DataError(f"--split-on {split_on!r} cuts plain text and does not fit --source {kind}; leave one of the two out")
        try:
            re.compile(split_on)
        except re.error as error:
            raise DataError(f"--split-on {split_on!r} is not a regular expression ({error}); mend it") from None
    filters: list[Where | Language] = [parse_where(*words) for words in where]
    if language is not None:
        filters.append(_language(kind, corpus, language, min_language_score, language_field))
    elif language_field is not None or min_language_score:
        raise DataError("--min-language-score and --language-field belong to --language, which is not given; add it or leave them out")
    if filters and corpus.layout == "text":
        raise DataError(f"--where and --language look at fields of records and do not fit --source {kind}; leave one of the two out")
    return Source(kind, find_files(corpus.layout, inputs, output), keys, split_on, tuple(filters))


def _language(kind: str, corpus: Corpus, language: str, minimum: float, names: str | None) -> Language:
    names = names or corpus.language
    if names is None:
        raise DataError(f"--language {language}: it is not known where a record of --source {kind} has its language; add --language-field")
    name, _, score = names.partition(",")
    return Language(language, minimum, name, score or f"{name}_score")
