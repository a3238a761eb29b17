"""`tokenize`: documents of a source, through a tokenizer, into one indexed dataset with its manifest and its rejects."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from data_prep.indexed_dataset import IndexedDatasetWriter, token_dtype
from data_prep.manifest import SUFFIX, Manifest, differences, manifest_path, read_manifest
from data_prep.progress import Progress
from data_prep.publish import Staging
from data_prep.sources import REJECT_FILES, Record, Reject, Source
from data_prep.tokenizers import Tokenizer
from hybrid_megatron.errors import DataError

NAME = "documents"
BATCH_CHARACTERS = 4_000_000
BATCH_DOCUMENTS = 4_096
# A wrong --text-key rejects everything: say so early, not after a day.
EARLY_RECORDS = 1_000


@dataclass(frozen=True)
class TokenizeOptions:
    """`min_tokens` counts a document's own tokens, without BOS and EOS; shorter documents are dropped and counted."""

    add_bos: bool = True
    add_eos: bool = True
    max_reject_fraction: float = 0.001
    min_tokens: int = 1


def tokenize_documents(
    source: Source, tokenizer: Tokenizer, output: Path, options: TokenizeOptions, overwrite: bool = False
) -> tuple[Manifest, bool]:
    """Build `output/documents.{bin,idx,manifest.json}` and `output/rejects.jsonl`; returns the manifest and whether it was built now.

    Raises `DataError`, and leaves what was there, if the tokenizer lacks a special token that is asked for, if more records are rejected
    than allowed, if no document is left, or if another dataset is in the way.
    """
    for flag, wanted, index in (("BOS", options.add_bos, tokenizer.bos), ("EOS", options.add_eos, tokenizer.eos)):
        if wanted and index is None:
            raise DataError(f"tokenizer {tokenizer.name} has no {flag} token, and every document should get one; add --no-{flag.lower()}")
    request = {
        "tokenizer": tokenizer.describe(),
        "adds_bos": options.add_bos,
        "adds_eos": options.add_eos,
        "source": source.describe(),
        "options": {"max_reject_fraction": options.max_reject_fraction, "min_tokens": options.min_tokens},
    }
    with Staging(output, NAME) as staging:
        finished = finished_dataset(output / NAME, request, overwrite, staging.was_interrupted)
        if finished is not None:
            return finished, False
        manifest = _Job(source, tokenizer, options, staging).run(request)
        staging.publish([f"{NAME}.bin", f"{NAME}.idx", REJECT_FILES[0]], last=[f"{NAME}{SUFFIX}"])
        (output / REJECT_FILES[1]).unlink(missing_ok=True)
    return manifest, True


def finished_dataset(prefix: Path, request: dict, overwrite: bool, was_interrupted: bool) -> Manifest | None:
    """The finished dataset at `prefix` if it is what `request` asks for, None if one is to be built there.

    Raises `DataError` if another one is in the way.
    """
    if overwrite:
        return None
    if not manifest_path(prefix).exists():
        stray = [path for path in (Path(f"{prefix}.bin"), Path(f"{prefix}.idx")) if path.exists()]
        if stray and not was_interrupted:
            raise DataError(
                f"{stray[0]} is there without a manifest, so it is not known what it holds; add --overwrite or choose another --output"
            )
        return None
    manifest = read_manifest(prefix)
    changed = differences(manifest.request(), {"split": None} | request)
    if changed:
        raise DataError(
            f"{manifest_path(prefix)}: another dataset is finished there and differs in {'; '.join(changed)}; "
            "add --overwrite or choose another --output"
        )
    return manifest


class _Job:
    def __init__(self, source: Source, tokenizer: Tokenizer, options: TokenizeOptions, staging: Staging):
        self.source, self.tokenizer, self.options, self.staging = source, tokenizer, options, staging
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.reasons: Counter[str] = Counter()
        self.first_reject: Reject | None = None
        self.records = 0
        self.too_short = 0

    def run(self, request: dict) -> Manifest:
        progress = Progress("tokenize", self.source.total_bytes)
        writer = IndexedDatasetWriter(self.staging.path(f"{NAME}.bin"), self.staging.path(f"{NAME}.idx"), self.dtype)
        try:
            with self.staging.path(REJECT_FILES[0]).open("w", encoding="utf-8", newline="\n") as rejects:
                for batch in self._batches(rejects):
                    self._add(batch, writer, rejects)
                    progress.update(self.source.bytes_read, writer.documents, writer.tokens)
            self._check_rejects(final=True)
            if writer.documents == 0:
                raise DataError(
                    f"no document is left of {self.records} records ({self._summary()}); check --input, --text-key and --min-tokens"
                )
            written = writer.finish()
        finally:
            progress.close()
            writer.close()
        manifest = Manifest.of(
            written,
            **request,
            rejected={"count": self.reasons.total(), "by_reason": dict(sorted(self.reasons.items()))},
            dropped={"too_short": self.too_short, "blank_lines": self.source.blank_lines},
        )
        self.staging.write_text(f"{NAME}{SUFFIX}", manifest.to_json())
        return manifest

    def _batches(self, rejects: TextIO) -> Iterator[list[Record]]:
        batch: list[Record] = []
        characters = 0
        for record in self.source.records():
            self.records += 1
            if isinstance(record, Reject):
                self._reject(record, rejects)
                continue
            batch.append(record)
            characters += len(record.text)
            if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
                yield batch
                batch, characters = [], 0
        if batch:
            yield batch

    def _add(self, batch: list[Record], writer: IndexedDatasetWriter, rejects: TextIO) -> None:
        before = [self.tokenizer.bos] if self.options.add_bos else []
        after = [self.tokenizer.eos] if self.options.add_eos else []
        documents, lengths = [], []
        for record, ids in zip(batch, self.tokenizer.encode_batch([record.text for record in batch]), strict=True):
            if not ids:
                self._reject(Reject(record.file, record.line, "no_tokens", "the tokenizer makes nothing of this text"), rejects)
            elif len(ids) < self.options.min_tokens:
                self.too_short += 1
            else:
                documents.append(np.array(before + ids + after, np.int64))
                lengths.append(len(documents[-1]))
        if documents:
            tokens = np.concatenate(documents)
            assert 0 <= tokens.min() and tokens.max() < self.tokenizer.vocab_size
            writer.add_many(tokens.astype(self.dtype), lengths)

    def _reject(self, reject: Reject, rejects: TextIO) -> None:
        self.reasons[reject.reason] += 1
        self.first_reject = self.first_reject or reject
        rejects.write(json.dumps(vars(reject), ensure_ascii=True) + "\n")
        self._check_rejects(final=False)

    def _check_rejects(self, final: bool) -> None:
        rejected, limit = self.reasons.total(), self.options.max_reject_fraction
        hopeless = self.records >= EARLY_RECORDS and rejected > max(limit, 0.5) * self.records
        if not hopeless and not (final and rejected > limit * self.records):
            return
        first = self.first_reject
        assert first is not None
        path = self._keep_rejects()
        raise DataError(
            f"{rejected} of {'' if final else 'the first '}{self.records} records are rejected ({self._summary()}), more than "
            f"--max-reject-fraction {limit:g} allows; first: {first.file}, line {first.line}: {first.reason} ({first.detail}). "
            f"All are listed in {path}; mend the input or raise the limit"
        )

    def _keep_rejects(self) -> Path:
        """Leave the list of rejects for the user, beside a finished dataset's own list if there is one."""
        taken = manifest_path(self.staging.directory / NAME).exists()
        path = self.staging.directory / REJECT_FILES[1 if taken else 0]
        self.staging.path(REJECT_FILES[0]).rename(path)
        return path

    def _summary(self) -> str:
        counts = [f"{count} {reason}" for reason, count in self.reasons.most_common()]
        if self.too_short:
            counts.append(f"{self.too_short} shorter than --min-tokens {self.options.min_tokens}")
        return ", ".join(counts) or "none rejected"
