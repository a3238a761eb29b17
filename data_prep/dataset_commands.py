"""The commands that work on finished datasets: merge, blend, verify, stats, inspect."""

import argparse
import dataclasses
import glob
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from data_prep.arguments import add_overwrite, count, dataset
from data_prep.report import dataset_parts, say
from hybrid_megatron.errors import DataError

_PREFIX = "a dataset's path, with or without .bin"


def add_dataset_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """`command(name, run, summary)` adds one command and returns its parser."""
    merge = command("merge", _merge, "Merge datasets into one, their documents in order.")
    merge.add_argument("--input", type=dataset, nargs="+", required=True, metavar="PREFIX", help=f"{_PREFIX}, or a glob of them in quotes")
    merge.add_argument("--output", type=Path, required=True, metavar="PREFIX")
    add_overwrite(merge)

    blend = command("blend", _blend, "Draw documents from datasets by weight, to an exact number of tokens.")
    weights = "a weight and a dataset, as often as there are datasets; weights count as shares of their sum"
    blend.add_argument("--input", nargs="+", required=True, metavar="WEIGHT PREFIX", help=weights)
    blend.add_argument("--tokens", type=count(1), required=True, metavar="N", help="such as 1.5M or 50B")
    blend.add_argument("--output", type=Path, required=True, metavar="PREFIX")
    blend.add_argument("--seed", type=count(0), default=0, metavar="N")
    blend.add_argument("--repeat", action="store_true", help="draw documents again once a dataset is used up")
    add_overwrite(blend)

    verify = command("verify", _verify, "Check a dataset against its index and its manifest; exit code 2 with every problem.")
    verify.add_argument("prefix", type=dataset, metavar="PREFIX", help=_PREFIX)
    verify.add_argument("--tokenizer", metavar="NAME_OR_PATH", help="check that the dataset was made with it")
    verify.add_argument("--json", action="store_true", help="print one JSON object")

    stats = command("stats", _stats, "Count documents and tokens, and say how long the documents are.")
    stats.add_argument("prefix", type=dataset, metavar="PREFIX", help=_PREFIX)
    stats.add_argument("--plot", type=Path, metavar="FILE.png", help="draw a histogram of the lengths")
    stats.add_argument("--json", action="store_true", help="print one JSON object")

    inspect = command("inspect", _inspect, "Show one document of a dataset as ids and as text.")
    inspect.add_argument("prefix", type=dataset, metavar="PREFIX", help=_PREFIX)
    inspect.add_argument("number", type=int, metavar="N", help="from 0; -1 is the last one")
    inspect.add_argument("--tokenizer", metavar="NAME_OR_PATH", help="default: the file of the manifest's name beside the dataset")


def _merge(options: argparse.Namespace) -> None:
    from data_prep.merge import merge_datasets

    parts = [prefix for given in options.input for prefix in _found(given)]
    manifest, built = merge_datasets(parts, options.output, options.overwrite)
    say(built, str(options.output), [*dataset_parts(manifest), f"{len(parts):,} parts"])


def _found(given: Path) -> list[Path]:
    """The datasets of a glob in quotes, by name; else the one that is given."""
    if not glob.has_magic(str(given)) or Path(f"{given}.idx").exists():
        return [given]
    names = glob.glob(f"{given}.idx", recursive=True)
    if not names:
        raise DataError(f"--input {given}: no dataset has such a name; check the path, and that the datasets are finished")
    return sorted(Path(name.removesuffix(".idx")) for name in names)


def _blend(options: argparse.Namespace) -> None:
    from data_prep.blend import blend_datasets

    inputs = _weighted(options.input)
    manifest, built = blend_datasets(inputs, options.tokens, options.output, options.seed, options.repeat, options.overwrite)
    say(built, str(options.output), dataset_parts(manifest))
    for (_, prefix), taken in zip(inputs, manifest.blend["taken"], strict=True):
        share = f"{100 * taken['tokens'] / manifest.tokens:.2f}%"
        print(f"  {prefix}: {taken['documents']:,} documents, {taken['tokens']:,} tokens, {share}")
    if cut := manifest.blend.get("cut"):
        print(f"  the last document is cut to {cut['tokens']:,} of its {cut['of']:,} tokens")


def _weighted(words: Sequence[str]) -> list[tuple[float, Path]]:
    """`W1 PREFIX1 W2 PREFIX2 ...` as pairs."""
    pairs = []
    for at in range(0, len(words), 2):
        try:
            weight, prefix = float(words[at]), dataset(words[at + 1])
        except (ValueError, IndexError):
            raise DataError(f"--input {' '.join(words)}: give a weight before each dataset, such as 0.7 /data/a 0.3 /data/b") from None
        pairs.append((weight, prefix))
    return pairs


def _verify(options: argparse.Namespace) -> None:
    from data_prep.tokenizers import load
    from data_prep.verify import verify

    problems = verify(options.prefix, load(options.tokenizer) if options.tokenizer is not None else None)
    if options.json:
        print(json.dumps({"prefix": str(options.prefix), "sound": not problems, "problems": problems}, indent=2, ensure_ascii=False))
        if problems:
            raise SystemExit(2)
    elif problems:
        raise DataError("\n".join(problems))
    else:
        print(f"{options.prefix}: sound")


def _stats(options: argparse.Namespace) -> None:
    from data_prep.stats import dataset_stats, plot_lengths, stats_table

    stats = dataset_stats(options.prefix)
    if options.json:
        values = {field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)}
        print(json.dumps({key: value for key, value in values.items() if key not in ("lengths", "counts")}, indent=2))
    else:
        print(f"{options.prefix}: {stats_table(stats)}")
    if options.plot is not None:
        plot_lengths(stats, str(options.prefix), options.plot)


def _inspect(options: argparse.Namespace) -> None:
    from data_prep.inspect_document import inspect_document

    document = inspect_document(options.prefix, options.number, options.tokenizer)
    print(f"document {document.number}, {len(document.ids):,} tokens")
    print(f"ids: {' '.join(map(str, document.ids))}")
    print("text: its tokenizer is not at hand; give --tokenizer" if document.text is None else f"text:\n{document.text}")
