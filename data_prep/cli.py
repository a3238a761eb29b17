"""The command line: `python -m data_prep COMMAND`. Parses, calls one function, says what was made."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from data_prep.arguments import Parser, add_overwrite, count, dataset, fraction
from data_prep.dataset_commands import add_dataset_commands
from data_prep.fetch_command import add_fetch_command
from data_prep.progress import human_bytes
from data_prep.report import dataset_parts, say
from data_prep.source_arguments import add_source, source_of
from data_prep.tokenize_command import add_tokenize
from hybrid_megatron.errors import exit_with_code_2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 2 a mistake the user can mend, 130 interrupted."""
    options = _parser().parse_args(arguments)
    try:
        with exit_with_code_2():
            options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # `inspect ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted; finished output that was there before is untouched", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m data_prep", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], None], summary: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        added.set_defaults(run=run)
        return added

    fetch = command("fetch-sample", _fetch_sample, "Fetch a small real corpus (Shakespeare and Milton) as DIR/sample.jsonl.")
    fetch.add_argument("--output", type=Path, required=True, metavar="DIR")

    add_fetch_command(command)

    train = command("train-tokenizer", _train_tokenizer, "Train a SentencePiece byte-pair tokenizer on documents.")
    add_source(train)
    train.add_argument("--vocab-size", type=count(260), default=4096, metavar="N", help="bytes and specials included (default 4096)")
    train.add_argument("--output", type=Path, required=True, metavar="FILE.model")
    train.add_argument("--max-characters", type=count(1), default=200_000_000, metavar="N", help="read so much text (default 200,000,000)")
    add_overwrite(train)

    add_tokenize(command)

    split = command("split", _split, "Split a dataset into DIR/train.* and DIR/valid.* by whole documents.")
    split.add_argument("--input", type=dataset, required=True, metavar="DIR/documents", help="with or without .bin")
    split.add_argument("--output", type=Path, required=True, metavar="DIR")
    split.add_argument("--valid-fraction", type=fraction(False), default=0.05, metavar="F", help="of all tokens (default 0.05)")
    split.add_argument("--seed", type=count(0), default=0, metavar="N")
    add_overwrite(split)

    add_dataset_commands(command)

    cache = command("build-cache", _build_cache, "Build the index maps of a recipe's datasets, before training starts.")
    cache.add_argument("recipe", metavar="RECIPE")
    cache.add_argument("overrides", nargs="*", default=[], metavar="a.b=c")
    return parser


def _fetch_sample(options: argparse.Namespace) -> None:
    from data_prep.fetch_sample import fetch_sample

    manifest, built = fetch_sample(options.output)
    parts = [f"{manifest['documents']:,} documents", f"{human_bytes(manifest['bytes'])}", f"from {manifest['package']}"]
    say(built, str(options.output / "sample.jsonl"), parts)


def _train_tokenizer(options: argparse.Namespace) -> None:
    from data_prep.train_tokenizer import train_tokenizer

    source = source_of(options)
    manifest, built = train_tokenizer(source, options.vocab_size, options.output, options.max_characters, options.overwrite)
    trained = manifest["trained_on"]
    text = f"trained on {trained['characters']:,} characters of {trained['documents']:,} documents"
    parts = [f"{manifest['tokenizer']['vocab_size']:,} words", text]
    if trained["unusable_records"]:
        parts.append(f"{trained['unusable_records']:,} unusable records left out")
    say(built, str(options.output), parts)


def _split(options: argparse.Namespace) -> None:
    from data_prep.split import split

    manifests, built = split(options.input, options.output, options.valid_fraction, options.seed, options.overwrite)
    total = sum(manifest.tokens for manifest in manifests.values())
    for part, manifest in manifests.items():
        say(built, str(options.output / part), [*dataset_parts(manifest), f"{100 * manifest.tokens / total:.2f}% of the tokens"])
    share = manifests["valid"].tokens / total
    if abs(share - options.valid_fraction) > 0.25 * options.valid_fraction:
        print(
            f"warning: {options.output / 'valid'} holds {share:.2%} of the tokens where --valid-fraction {options.valid_fraction:g} was "
            "asked for: documents stay whole, and these are few or long; another --seed draws others",
            file=sys.stderr,
        )


def _build_cache(options: argparse.Namespace) -> None:
    from data_prep.build_cache import build_cache

    folders = dict.fromkeys(build_cache([options.recipe, *options.overrides]))
    for folder in folders:
        print(f"{folder}: index maps are there")
    if not folders:
        print("data.whole_documents=true needs no index maps; the datasets have documents that fill a sample")
