"""The command `fetch`: shards of public corpora from the Hugging Face hub."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from data_prep.arguments import count, fraction
from data_prep.corpora import CORPORA
from data_prep.progress import human_bytes
from data_prep.report import say
from hybrid_megatron.errors import DataError
from hybrid_megatron.quantities import human_count


def add_fetch_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    """`command(name, run, summary)` adds one command and returns its parser."""
    parser = command("fetch", _fetch, "Fetch shards of a public corpus from the Hugging Face hub, enough for a budget of tokens.")
    parser.add_argument("corpus", choices=list(CORPORA))
    parser.add_argument("--tokens", type=count(1), required=True, metavar="N", help="as 50B or 1.5M, by estimate from the shards' sizes")
    parser.add_argument("--output", type=Path, metavar="DIR", help="needed unless --list; run again, it brings what is missing or damaged")
    parser.add_argument("--seed", type=count(0), default=0, metavar="N", help="of the choice of shards (default 0)")
    parser.add_argument("--margin", type=fraction(True), default=0.05, metavar="F", help="choose so much more than N (default 0.05)")
    parser.add_argument("--revision", metavar="R", help="commit, tag or branch (default: the pinned commit)")
    parser.add_argument("--repository", metavar="OWNER/NAME", help="another data set of the hub: a mirror, or a copy in another format")
    parser.add_argument("--pattern", action="append", default=[], metavar="GLOB", help="other shards; * also matches /; may be repeated")
    ratio = "of the files as they lie on the hub, in place of the corpus's own estimate"
    parser.add_argument("--tokens-per-byte", type=_positive, metavar="F", help=ratio)
    parser.add_argument("--endpoint", metavar="URL", help="of the hub (default HF_ENDPOINT or https://huggingface.co)")
    parser.add_argument("--workers", type=count(1), default=4, metavar="N", help="files at once (default 4)")
    parser.add_argument("--list", action="store_true", help="only print which shards would be fetched")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")


def _fetch(options: argparse.Namespace) -> None:
    from data_prep.fetch import Request, fetch, plan

    if options.output is None and not options.list:
        raise DataError("fetch needs --output DIR to write to, or --list to print the choice alone")
    names = ("corpus", "tokens", "seed", "margin", "repository", "revision", "tokens_per_byte", "endpoint")
    request = Request(**{name: getattr(options, name) for name in names}, patterns=tuple(options.pattern))
    manifest, fetched = (plan(request), 0) if options.list else fetch(request, options.output, options.workers)
    if options.json:
        print(json.dumps(manifest, indent=1, ensure_ascii=False))
        return
    shards = f"{len(manifest['files']):,} of {manifest['corpus_shards']:,} shards"
    tokens = f"about {human_count(manifest['estimated_tokens'])} tokens"
    origin = f"{manifest['repository']} at {manifest['revision'][:12]}"
    parts = [shards, human_bytes(manifest["bytes"]), tokens, origin, manifest["licence"], f"text key {manifest['text_key']}"]
    if options.list:
        print(f"{options.corpus}: {', '.join(parts)}")
        for entry in manifest["files"]:
            print(f"  {human_bytes(entry['size']):>9}  {human_count(entry['tokens']):>6} tokens  {entry['path']}")
        return
    say(fetched > 0, str(options.output), parts)


def _positive(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{word} is not a number above zero")
    return value
