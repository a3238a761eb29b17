"""One shard of a corpus through the tokenizer: a part, which is an indexed dataset of its own with its manifest and its rejects.

A part depends on its shard, the tokenizer and the options alone, not on threads, processes or what ran before, byte for byte.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from data_prep.indexed_dataset import IndexedDatasetWriter, token_dtype
from data_prep.inputs import REJECT_FILES, Shard
from data_prep.manifest import SUFFIX, Manifest, differences, manifest_path, read_manifest
from data_prep.publish import Staging
from data_prep.records import Record, Reject
from data_prep.sources import Source
from data_prep.tokenizer_base import EncodingFailed, Tokenizer
from hybrid_megatron.errors import DataError

NAME = "documents"
BATCH_CHARACTERS = 2_000_000
BATCH_RECORDS = 4_096
# A wrong --text-key rejects everything: say so early, not after a day.
EARLY_RECORDS = 1_000
# A fast encoder is checked on the first of so many documents, which at a tenth of its speed costs 5% of its time.
CHECKED_OF = 199

OnProgress = Callable[[int, int, int], None]
"""Takes bytes read, documents and tokens of a part so far."""


@dataclass(frozen=True)
class TokenizeOptions:
    """What becomes of a document, and which are kept.

    `min_tokens` and `max_tokens` (None: no limit) count a document's own tokens, without BOS and EOS; `whole_documents` (0: off) is a
    sample's length in tokens: kept are documents that hold a whole sample and the token after it, BOS and EOS included. All others are
    dropped and counted.
    """

    add_bos: bool = True
    add_eos: bool = True
    max_reject_fraction: float = 0.001
    min_tokens: int = 1
    max_tokens: int | None = None
    whole_documents: int = 0

    def lengths(self) -> dict[str, int]:
        """The manifest's `options` about lengths."""
        values = {"min_tokens": self.min_tokens}
        if self.max_tokens is not None:
            values["max_tokens"] = self.max_tokens
        if self.whole_documents:
            values["whole_documents"] = self.whole_documents
        return values


@dataclass(frozen=True)
class Job:
    """What all parts of a dataset have in common. `encoder` is one of `encoders.ENCODERS` and changes no byte; `request` is their
    manifests' request without inputs; picklable."""

    source: Source
    tokenizer: str
    encoder: str
    options: TokenizeOptions
    output: Path
    parts: Path
    request: dict[str, Any]

    def prefix(self, shard: Shard) -> Path:
        return self.parts / shard.name

    def rejects(self, shard: Shard) -> Path:
        return self.parts / f"{shard.name}.{REJECT_FILES[0]}"


def finished_part(job: Job, shard: Shard) -> Manifest | None:
    """The manifest of a part that is complete and whose input files are still the same."""
    if not manifest_path(job.prefix(shard)).exists() or not job.rejects(shard).exists():
        return None
    try:
        manifest = read_manifest(job.prefix(shard))
    except DataError:
        return None
    inputs = manifest.source["inputs"]
    request = job.request | {"source": job.request["source"] | {"inputs": inputs}, "split": None}
    if differences(manifest.request(), request) or not job.source.of(shard).unchanged(inputs):
        return None
    return manifest


def make_part(job: Job, tokenizer: Tokenizer, shard: Shard, threads: int, on_progress: OnProgress) -> Manifest:
    """Tokenize one shard into `parts/NAME.{bin,idx,rejects.jsonl,manifest.json}`, the last of which makes it complete.

    Raises `DataError` for input that cannot be read to its end, where nearly all of its first records are rejected, or where the encoder
    fails on a document or finds other ids than a better proven one.
    """
    with Staging(job.parts, shard.name, beside_others=True) as staging:
        manifest = _Part(job, tokenizer, shard, staging).make(threads, on_progress)
        staging.write_text(f"{shard.name}{SUFFIX}", manifest.to_json())
        files = [f"{shard.name}.bin", f"{shard.name}.idx", job.rejects(shard).name]
        staging.publish(files, last=[f"{shard.name}{SUFFIX}"])
    return manifest


class _Part:
    def __init__(self, job: Job, tokenizer: Tokenizer, shard: Shard, staging: Staging):
        self.job, self.tokenizer, self.staging, self.options = job, tokenizer, staging, job.options
        self.source = job.source.of(shard)
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.writer = IndexedDatasetWriter(staging.path(f"{shard.name}.bin"), staging.path(f"{shard.name}.idx"), self.dtype)
        self.reject_path = staging.path(job.rejects(shard).name)
        self.before = np.array([tokenizer.bos] if job.options.add_bos else [], np.int64)
        self.after = np.array([tokenizer.eos] if job.options.add_eos else [], np.int64)
        self.reasons: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter(too_short=0)
        self.records = self.encoded = 0

    def make(self, threads: int, on_progress: OnProgress) -> Manifest:
        try:
            with self.reject_path.open("w", encoding="utf-8", newline="\n") as rejects:
                for batch, encoded in _encoded(self._batches(), self.tokenizer, threads):
                    self._add(batch, iter(encoded), rejects)
                    on_progress(self.source.bytes_read, self.writer.documents, self.writer.tokens)
            written = self.writer.finish()
        finally:
            self.writer.close()
        filtered = {f"filtered: {name}": count for name, count in self.source.filtered.items()}
        return Manifest.of(
            written,
            **self.job.request | {"source": self.source.describe()},
            rejected={"count": self.reasons.total(), "by_reason": dict(sorted(self.reasons.items()))},
            dropped=dict(self.dropped) | {"blank_lines": self.source.blank_lines} | filtered,
        )

    def _batches(self) -> Iterator[list[Record | Reject]]:
        batch: list[Record | Reject] = []
        characters = 0
        for record in self.source.records():
            batch.append(record)
            characters += len(record.text) if isinstance(record, Record) else 0
            if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_RECORDS:
                yield batch
                batch, characters = [], 0
        if batch:
            yield batch

    def _add(self, batch: list[Record | Reject], encoded: Iterator[np.ndarray], rejects: TextIO) -> None:
        documents, lengths = [], []
        for record in batch:
            self.records += 1
            if isinstance(record, Reject):
                self._reject(record, rejects)
                continue
            ids = next(encoded)
            if self.encoded % CHECKED_OF == 0 and not self.tokenizer.agrees(record.text, ids):
                raise _encoder_error(record, f"{self.tokenizer.encoder} finds other ids than tiktoken")
            self.encoded += 1
            if not len(ids):
                self._reject(Reject(record.file, record.line, "no_tokens", "the tokenizer makes nothing of this text"), rejects)
                continue
            length = len(self.before) + len(ids) + len(self.after)
            if len(ids) < self.options.min_tokens or length <= self.options.whole_documents:
                self.dropped["too_short"] += 1
            elif self.options.max_tokens is not None and len(ids) > self.options.max_tokens:
                self.dropped["too_long"] += 1
            else:
                documents += [self.before, ids, self.after]
                lengths.append(length)
        if documents:
            tokens = np.concatenate(documents)
            assert 0 <= tokens.min() and tokens.max() < self.tokenizer.vocab_size
            self.writer.add_many(tokens.astype(self.dtype), lengths)

    def _reject(self, reject: Reject, rejects: TextIO) -> None:
        self.reasons[reject.reason] += 1
        rejects.write(json.dumps(vars(reject), ensure_ascii=True) + "\n")
        rejected, limit = self.reasons.total(), self.options.max_reject_fraction
        if self.records >= EARLY_RECORDS and rejected > max(limit, 0.5) * self.records:
            rejects.flush()
            path = keep_rejects(self.job.output, self.reject_path)
            raise too_many_rejects(self.reasons, self.records, limit, path, early=True)


def _encoded(
    batches: Iterable[list[Record | Reject]], tokenizer: Tokenizer, threads: int
) -> Iterator[tuple[list[Record | Reject], list[np.ndarray]]]:
    """Batches with the ids of their documents. With several threads the next batch is read while one is encoded."""

    def encode(batch: list[Record | Reject]) -> list[np.ndarray]:
        records = [record for record in batch if isinstance(record, Record)]
        try:
            return tokenizer.encode_arrays([record.text for record in records])
        except EncodingFailed as failure:
            raise _encoder_error(records[failure.number], failure.reason) from None

    if threads == 1:
        yield from ((batch, encode(batch)) for batch in batches)
        return
    with ThreadPoolExecutor(1) as pool:
        waiting = None
        for batch in batches:
            following = batch, pool.submit(encode, batch)
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = following
        if waiting is not None:
            yield waiting[0], waiting[1].result()


def _encoder_error(record: Record, what: str) -> DataError:
    return DataError(f"{record.file}, line {record.line}: {what}; finished parts are kept, so run the command with --encoder tiktoken")


def keep_rejects(output: Path, path: Path) -> Path:
    """Leave a list of rejects for the user, beside a finished dataset's own list if there is one."""
    taken = manifest_path(output / NAME).exists()
    return path.rename(output / REJECT_FILES[1 if taken else 0])


_WAYS_OUT = {
    "missing_key": "give the key of the text as --text-key",
    "missing_field": "mend --where and --language, which compare it",
    "invalid_utf8": "convert the input to UTF-8, for example with iconv",
}
"""Where all rejects have this reason."""


def too_many_rejects(reasons: Counter[str], records: int, limit: float, path: Path, listed: str = "", early: bool = False) -> DataError:
    """What to tell where more records are rejected than allowed; `path` begins with the first, and they are `listed` there or elsewhere."""
    with path.open(encoding="utf-8") as file:
        first = json.loads(file.readline())
    mend = _WAYS_OUT.get(first["reason"], "mend the input") if len(reasons) == 1 else "mend the input"
    if reasons.total() < records:
        mend += ", or raise the limit"
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    return DataError(
        f"{reasons.total()} of {'the first ' if early else ''}{records} records are rejected ({counts}), more than "
        f"--max-reject-fraction {limit:g} allows; first: {first['file']}, line {first['line']}: {first['reason']} ({first['detail']}). "
        f"All are listed in {listed or path}; {mend}"
    )
