"""`python -m data_prep tokenize`: its arguments, and what it says."""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.arguments import add_overwrite, count, fraction
from data_prep.encoders import ENCODERS
from data_prep.progress import human_bytes, human_seconds
from data_prep.report import dataset_parts, say
from data_prep.source_arguments import add_source, source_of
from hybrid_megatron.errors import DataError

if TYPE_CHECKING:
    from data_prep.tokenize_documents import Outcome


def add_tokenize(command: Callable[..., argparse.ArgumentParser]) -> None:
    parser = command("tokenize", _tokenize, "Tokenize documents into DIR/documents.*; rejects go to DIR/rejects.jsonl.")
    add_source(parser)
    kinds = "llama3, qwen3, gpt2; SentencePiece .model; Hugging Face folder, tokenizer.json or hub name"
    parser.add_argument("--tokenizer", required=True, metavar="NAME_OR_PATH", help=kinds)
    encoders = (
        "what encodes the vocabularies of tiktoken (llama3, qwen3, gpt2), with the same ids (default auto: gigatoken where installed)"
    )
    parser.add_argument("--encoder", choices=ENCODERS, default="auto", help=encoders)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--no-bos", action="store_true", help="put no BOS token before a document")
    parser.add_argument("--no-eos", action="store_true", help="put no EOS token after a document")
    parser.add_argument("--max-reject-fraction", type=fraction(True), default=0.001, metavar="F", help="of all records (default 0.001)")
    parser.add_argument("--min-tokens", type=count(1), default=1, metavar="N", help="drop shorter documents; BOS and EOS do not count")
    parser.add_argument("--max-tokens", type=count(1), metavar="N", help="drop longer documents; BOS and EOS do not count")
    whole = "keep only documents that hold a whole sample of N tokens and the token after it, BOS and EOS included"
    parser.add_argument("--whole-documents", type=count(1), default=0, metavar="N", help=whole)
    parser.add_argument("--workers", type=count(1), default=_cores(), metavar="N", help="threads that tokenize (default: all cores)")
    processes = "processes that tokenize a file at a time and share the threads (default: one a thread, at most one a file)"
    parser.add_argument("--processes", type=count(1), metavar="N", help=processes)
    share = "of --num-shards jobs of an array: make the parts of every Nth file alone; afterwards the command without the two joins them"
    parser.add_argument("--shard-index", type=count(0), metavar="I", help=share)
    parser.add_argument("--num-shards", type=count(1), metavar="N", help="jobs of the array")
    parser.add_argument("--keep-parts", action="store_true", help="leave DIR/parts, a dataset a file, when they are joined")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    add_overwrite(parser)


def _tokenize(options: argparse.Namespace) -> None:
    from data_prep.tokenize_documents import Spread, TokenizeOptions, tokenize_documents

    index, number = options.shard_index, options.num_shards
    if (index is None) != (number is None):
        raise DataError("--shard-index and --num-shards belong together; give both or none")
    if index is not None and index >= number:
        raise DataError(
            f"--shard-index {index} is not below --num-shards {number}; jobs are counted from 0 (sbatch --array=0-{number - 1})"
        )
    source = source_of(options, options.output)
    settings = TokenizeOptions(
        not options.no_bos,
        not options.no_eos,
        options.max_reject_fraction,
        options.min_tokens,
        options.max_tokens,
        options.whole_documents,
    )
    spread = Spread(options.processes or options.workers, options.workers, None if index is None else (index, number))
    how = options.overwrite, options.keep_parts, options.encoder
    outcome = tokenize_documents(source, options.tokenizer, options.output, settings, spread, *how)
    if options.json:
        print(json.dumps(_summary(options, outcome), ensure_ascii=False))
    else:
        _say(options, outcome)


def _summary(options: argparse.Namespace, outcome: "Outcome") -> dict[str, Any]:
    manifests = outcome.parts if outcome.manifest is None else [outcome.manifest]
    rejected: dict[str, int] = {}
    dropped: dict[str, int] = {}
    for manifest in manifests:
        for into, counts in ((rejected, manifest.rejected["by_reason"]), (dropped, manifest.dropped)):
            for name, number in counts.items():
                into[name] = into.get(name, 0) + number
    return {
        "output": str(options.output / "documents") if outcome.manifest else str(options.output / "parts"),
        "built": outcome.built,
        "documents": sum(manifest.documents for manifest in manifests),
        "tokens": sum(manifest.tokens for manifest in manifests),
        "rejected": rejected,
        "dropped": dropped,
        "parts": len(outcome.parts),
        "parts_made": outcome.made,
        "encoder": outcome.encoder,
        "bytes_read": outcome.bytes,
        "seconds": round(outcome.seconds, 3),
    }


def _say(options: argparse.Namespace, outcome: "Outcome") -> None:
    summary = _summary(options, outcome)
    if outcome.manifest is not None:
        say(outcome.built, summary["output"], dataset_parts(outcome.manifest))
    else:
        counts = [f"{summary['parts']:,} parts", f"{summary['documents']:,} documents", f"{summary['tokens']:,} tokens"]
        say(outcome.built, summary["output"], [*counts, "run without --shard-index to join all"])
    if outcome.made:
        rate = f"{human_bytes(outcome.bytes)} in {human_seconds(outcome.seconds)}, {human_bytes(outcome.bytes / outcome.seconds)}/s"
        there = len(outcome.parts) - outcome.made
        print(f"  read {rate}" + (f"; {there:,} parts were there already" if there else ""))
    if rejected := summary["rejected"]:
        where = options.output / ("rejects.jsonl" if outcome.manifest else "parts/*.rejects.jsonl")
        reasons = ", ".join(f"{number} {reason}" for reason, number in rejected.items())
        print(f"  rejected {sum(rejected.values()):,} records ({reasons}), listed in {where}")
    said = {
        "too_short": f"dropped {{:,}} documents shorter than --min-tokens {options.min_tokens}"
        + (f" or --whole-documents {options.whole_documents}" if options.whole_documents else ""),
        "too_long": f"dropped {{:,}} documents longer than --max-tokens {options.max_tokens}",
        "blank_lines": "skipped {:,} blank lines between records",
    }
    for name, number in summary["dropped"].items():
        if number:
            print("  " + said.get(name, f"left out {{:,}} records; {name}").format(number))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
