"""`tokenize`: documents of a source, through a tokenizer, into one indexed dataset with its manifest and its rejects.

Input files become parts (`data_prep.part`), over threads, processes and jobs of an array; the parts, joined, become the dataset. What is
finished stays finished: a job that was killed at any moment is run again and makes what is missing, with the same bytes.
"""

import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.encoders import ENCODERS
from data_prep.gigatoken_encoder import applies
from data_prep.inputs import PARTS, REJECT_FILES, Shard
from data_prep.join import join_parts
from data_prep.manifest import SUFFIX, Manifest, differences, manifest_path, read_manifest
from data_prep.part import NAME, Job, TokenizeOptions, finished_part, keep_rejects, too_many_rejects
from data_prep.plan import agree_on_plan, has_finished_parts, move_parts
from data_prep.progress import Progress
from data_prep.publish import Staging, shared_folder
from data_prep.sources import Source
from data_prep.tokenizer_base import Tokenizer
from data_prep.tokenizers import load
from data_prep.workers import make_parts
from hybrid_megatron.errors import DataError


@dataclass(frozen=True)
class Spread:
    """How a job is spread: `processes` with `threads` in all; `share`, if given, is (index, number) of this job in an array."""

    processes: int = 1
    threads: int = 1
    share: tuple[int, int] | None = None


@dataclass(frozen=True)
class Outcome:
    """What is there now, and what was made for it: `manifest` of the dataset, None for a job of an array; its `parts`; how many of these
    were `made` now, by which `encoder` ("" for none), from how many `bytes` of input and in how many `seconds`."""

    manifest: Manifest | None
    parts: list[Manifest]
    made: int
    bytes: int
    seconds: float
    built: bool
    encoder: str = ""


def tokenize_documents(
    source: Source,
    tokenizer: str,
    output: Path,
    options: TokenizeOptions,
    spread: Spread,
    overwrite: bool = False,
    keep_parts: bool = False,
    encoder: str = "auto",
) -> Outcome:
    """Build `output/documents.{bin,idx,manifest.json}` and `output/rejects.jsonl`; a job of an array only its parts in `output/parts`.

    `encoder` is one of `encoders.ENCODERS`; all make the same bytes, so an interrupted job may go on with another.

    Raises `DataError`, and leaves the dataset that was there, if the tokenizer lacks a special token that is asked for, if more records are
    rejected than allowed, if no document is left, or if another dataset or parts of another one are in the way.
    """
    started = time.monotonic()
    loaded = load(tokenizer)
    applies(loaded, encoder)
    for flag, wanted, index in (("BOS", options.add_bos, loaded.bos), ("EOS", options.add_eos, loaded.eos)):
        if wanted and index is None:
            raise DataError(f"tokenizer {loaded.name} has no {flag} token, and every document should get one; add --no-{flag.lower()}")
    request = {
        "tokenizer": loaded.describe(),
        "adds_bos": options.add_bos,
        "adds_eos": options.add_eos,
        "source": source.settings(),
        "options": options.lengths(),
    }
    job = Job(source, tokenizer, encoder, options, output, output / PARTS, request)
    shards = source.shards()
    if spread.share is not None:
        return _make_share(job, loaded, shards, spread, spread.share, overwrite, started)
    with Staging(output, NAME) as staging:
        finished = None if overwrite else finished_dataset(output / NAME, _request(job), False, staging.was_interrupted)
        if finished is not None:
            if not keep_parts:
                move_parts(job, shards, staging.path(PARTS))
            return Outcome(finished, [], 0, 0, time.monotonic() - started, False)
        _check_rejects(job, staging.was_interrupted)
        agree_on_plan(job, shards, overwrite, alone=True)
        try:
            parts, made, size, encoder = _make_missing(job, loaded, shards, spread)
            manifest = _join(job, shards, parts, staging, keep_parts)
            staging.publish([f"{NAME}.bin", f"{NAME}.idx", REJECT_FILES[0]], last=[f"{NAME}{SUFFIX}"])
        finally:
            if not has_finished_parts(job.parts):
                shutil.rmtree(job.parts, ignore_errors=True)
        (output / REJECT_FILES[1]).unlink(missing_ok=True)
        if not keep_parts:
            move_parts(job, shards, staging.path(PARTS))
    return Outcome(manifest, parts, made, size, time.monotonic() - started, True, encoder)


def _check_rejects(job: Job, was_interrupted: bool) -> None:
    """A file of rejects without a dataset or parts is somebody else's."""
    path = job.output / REJECT_FILES[0]
    if path.exists() and not manifest_path(job.output / NAME).exists() and not has_finished_parts(job.parts) and not was_interrupted:
        raise DataError(f"{path}: it is there without a dataset, and would be replaced; move it, or choose another --output")


def _make_share(
    job: Job, named: Tokenizer, shards: list[Shard], spread: Spread, share: tuple[int, int], overwrite: bool, started: float
) -> Outcome:
    if overwrite:
        raise DataError(f"--overwrite would let jobs of an array remove each other's parts; remove {job.parts} first, then run without it")
    with shared_folder(job.output):
        finished = finished_dataset(job.output / NAME, _request(job), overwrite=False, was_interrupted=False)
        if finished is not None:
            return Outcome(finished, [], 0, 0, time.monotonic() - started, False)
        agree_on_plan(job, shards, overwrite, alone=False)
        own = shards[share[0] :: share[1]]
        parts, made, size, encoder = _make_missing(job, named, own, spread)
        reasons, records = _count_rejects(parts)
        if reasons.total() > job.options.max_reject_fraction * records:
            first = next(job.rejects(shard) for shard, part in zip(own, parts, strict=True) if part.rejected["count"])
            listed = f"{job.parts}/*.{REJECT_FILES[0]}"
            raise too_many_rejects(reasons, records, job.options.max_reject_fraction, first, listed)
    return Outcome(None, parts, made, size, time.monotonic() - started, made > 0, encoder)


def _request(job: Job) -> dict[str, Any]:
    """What a finished dataset would have been asked for; inputs that are still the same are not hashed again."""
    prefix = job.output / NAME
    found = read_manifest(prefix).source.get("inputs", []) if manifest_path(prefix).exists() else []
    inputs = found if job.source.unchanged(found) else [{"path": str(path), "bytes": 0, "sha256": ""} for path in job.source.files]
    return _with_inputs(job, inputs)


def _with_inputs(job: Job, inputs: list[dict[str, Any]]) -> dict[str, Any]:
    """The request of the whole dataset."""
    return job.request | {
        "source": job.request["source"] | {"inputs": inputs},
        "options": {"max_reject_fraction": job.options.max_reject_fraction, **job.request["options"]},
    }


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


def _make_missing(job: Job, named: Tokenizer, shards: Sequence[Shard], spread: Spread) -> tuple[list[Manifest], int, int, str]:
    """Make the parts that are not there; returns the manifests of all, and how many were made, from how many bytes of input, by what."""
    encoder = ""
    missing = [shard for shard in shards if finished_part(job, shard) is None]
    if missing:
        processes = min(spread.processes, len(missing))
        total = sum(job.source.of(shard).total_bytes for shard in missing)
        progress, counts = Progress("tokenize", total), {}

        def on_progress(shard: Shard, *now: int) -> None:
            before = counts.get(shard, (0, 0, 0))
            counts[shard] = now
            for index in range(3):
                sums[index] += now[index] - before[index]
            progress.update(*sums)

        def on_encoder(name: str) -> None:
            nonlocal encoder
            if not encoder and name.startswith(ENCODERS):
                print(f"encoder: {name}", file=sys.stderr)
            encoder = name

        sums = [0, 0, 0]
        try:
            make_parts(job, named, missing, processes, max(1, spread.threads // processes), on_progress, on_encoder)
        finally:
            progress.close()
    parts = [read_manifest(job.prefix(shard)) for shard in shards]
    made = {shard.name for shard in missing}
    size = sum(entry["bytes"] for shard, part in zip(shards, parts) if shard.name in made for entry in part.source["inputs"])
    return parts, len(missing), size, encoder


def _join(job: Job, shards: Sequence[Shard], parts: list[Manifest], staging: Staging, keep_parts: bool) -> Manifest:
    rejects = staging.path(REJECT_FILES[0])
    with rejects.open("wb") as together:
        for shard in shards:
            with job.rejects(shard).open("rb") as file:
                shutil.copyfileobj(file, together)
    rejected, records = _count_rejects(parts)
    if rejected.total() > job.options.max_reject_fraction * records:
        path = keep_rejects(job.output, rejects)
        raise too_many_rejects(rejected, records, job.options.max_reject_fraction, path)
    dropped = {"too_short": 0, "blank_lines": 0}
    for part in parts:
        for name, count in part.dropped.items():
            dropped[name] = dropped.get(name, 0) + count
    kept = [(job.prefix(shard), part) for shard, part in zip(shards, parts, strict=True) if part.documents]
    if not kept:
        shutil.rmtree(job.parts)
        reasons = [f"{count} {name.replace('_', ' ')}" for name, count in (*rejected.most_common(), *dropped.items()) if count]
        why = ", ".join(reasons) or "the input is empty"
        raise DataError(f"no document is left of {records} records ({why}); check --input, --text-key and what is to be left out")
    written = join_parts(kept, staging.path(f"{NAME}.bin"), staging.path(f"{NAME}.idx"), keep_parts)
    manifest = Manifest.of(
        written,
        **_with_inputs(job, [entry for part in parts for entry in part.source["inputs"]]),
        rejected={"count": rejected.total(), "by_reason": dict(sorted(rejected.items()))},
        dropped=dropped,
    )
    staging.write_text(f"{NAME}{SUFFIX}", manifest.to_json())
    return manifest


def _count_rejects(parts: Sequence[Manifest]) -> tuple[Counter[str], int]:
    """How many records were rejected, by reason, and how many there were."""
    reasons: Counter[str] = Counter()
    for part in parts:
        reasons.update(part.rejected["by_reason"])
    dropped = sum(count for part in parts for name, count in part.dropped.items() if name != "blank_lines")
    return reasons, reasons.total() + dropped + sum(part.documents for part in parts)
