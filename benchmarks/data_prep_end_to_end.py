"""python benchmarks/data_prep_end_to_end.py [--full-size-maps] [--out DIR]

From raw shards to the datasets of both stages on 68 MB of real text (benchmarks/real_texts.py), with the commands of the README: shards in
the forms of DCLM's and LongWanjuan's, tokenized by Llama 3's tokenizer, split, verified, counted, mapped, and trained on for a step or two.
Prints what each step took and at what rate. `--full-size-maps` also makes the index maps of 50B tokens in documents of DCLM's mean length,
whose index is real and whose tokens are a sparse file: what build-cache takes at full size. Needs
`pip install --no-deps llama-models==0.3.0`, and apt-get for the texts.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import zstandard

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(ROOT))
from data_prep_speed import LAUNCHER  # noqa: E402
from real_texts import TEXTS  # noqa: E402

from data_prep.indexed_dataset import write_index  # noqa: E402

SHARDS = 16
FULL_TOKENS, MEAN_TOKENS = 50_000_000_000, 1_333  # DCLM-Baseline's card: 4T tokens in 3B documents
VOCABULARY = "model.vocab_size=128256"


class Steps:
    """Runs commands one after the other, and keeps what each took."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def run(self, words: list[str], size: int, unit: str, what: str) -> str:
        """One `python -m WORDS` on `size` of a `unit`; returns what it printed. Ends the program if the command fails."""
        done = subprocess.run([sys.executable, "-c", LAUNCHER, sys.executable, "-m", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"error: python -m {' '.join(words)} ended with code {done.returncode}")
        *said, last = done.stdout.splitlines()
        usage = json.loads(last)
        seconds, peak = usage["wall"], usage["peak"] / 1e6
        self.rows.append({"step": what, "seconds": round(seconds, 2), "size": size, "unit": unit, "peak_gb": round(peak, 3)})
        print(f"| {what} | {seconds:.1f} | {size / 1e6:.1f} M{unit} | {size / 1e6 / seconds:.2f} | {peak:.2f} |", flush=True)
        return "\n".join(said)


def write_dclm(texts: list[str], folder: Path) -> int:
    """Zstandard shards with DCLM's fields; returns the bytes of the texts."""
    folder.mkdir()
    for number in range(SHARDS):
        records = (
            {"text": text, "url": f"https://example.org/{number}", "language_id_whole_page_fasttext": {"en": 0.99}, "metadata": {}}
            for text in texts[number::SHARDS]
        )
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
        (folder / f"shard_{number:08d}_processed.jsonl.zst").write_bytes(zstandard.compress(lines))
    return sum(len(text.encode()) for text in texts)


def write_longwanjuan(texts: list[str], folder: Path) -> int:
    """Gzip shards whose text stands under `content`; returns its bytes."""
    folder.mkdir()
    for number in range(2):
        lines = "".join(json.dumps({"content": text}, ensure_ascii=False) + "\n" for text in texts[number::2])
        (folder / f"part-{number}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 6))
    return sum(len(text.encode()) for text in texts)


def stage(steps: Steps, source: str, raw: Path, size: int, folder: Path, valid: str, more: list[str], recipe: list[str]) -> dict:
    """One corpus to one stage's datasets and a first training; returns the summary of its tokenization."""
    tokenize = [
        "data_prep",
        "tokenize",
        "--source",
        source,
        "--tokenizer",
        "llama3",
        "--input",
        str(raw),
        "--output",
        str(folder),
        "--json",
    ]
    summary = json.loads(steps.run([*tokenize, *more], size, "B", f"tokenize --source {source}"))
    count, documents = summary["tokens"], str(folder / "documents")
    steps.run(["data_prep", "split", "--input", documents, "--output", str(folder), "--valid-fraction", valid], count, " tokens", "split")
    steps.run(["data_prep", "verify", str(folder / "train"), "--tokenizer", "llama3"], count, " tokens", "verify")
    steps.run(["data_prep", "stats", str(folder / "train"), "--plot", str(folder / "lengths.png")], count, " tokens", "stats")
    words = [*recipe, f"data.train={folder / 'train'}", f"data.valid={folder / 'valid'}", "data.tokenizer=llama3"]
    steps.run(["data_prep", "build-cache", *words], count, " tokens", "build-cache")
    words += [f"run_dir={folder / 'run'}", "tracking.wandb=disabled"]
    steps.run(["launch", "train", *words], 0, " tokens", "training steps of a tiny model")
    return summary


def full_size_maps(steps: Steps, folder: Path) -> None:
    """Index maps of as many tokens as a whole first stage has; all of them zero, in a sparse file that takes no room."""
    lengths = np.random.default_rng(0).lognormal(np.log(MEAN_TOKENS) - 0.5, 1, FULL_TOKENS // MEAN_TOKENS).astype("<i4") + 1
    folder.mkdir()
    write_index(folder / "train.idx", np.dtype("<i4"), len(lengths), lambda: [lengths])
    tokens = int(lengths.sum(dtype=np.int64))
    with (folder / "train.bin").open("wb") as file:
        file.truncate(4 * tokens)
    words = ["data_prep", "build-cache", "776m+gdn_nope_lh+pretrain_4k", f"data.train={folder / 'train'}", "data.valid=null"]
    steps.run([*words, "data.tokenizer=null"], tokens, " tokens", f"build-cache, {len(lengths):,} documents")
    size = sum(file.stat().st_size for file in (folder / "cache").iterdir())
    print(f"index {(folder / 'train.idx').stat().st_size / 1e9:.2f} GB, maps {size / 1e9:.2f} GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full-size-maps", action="store_true", help="index maps of 50B tokens too")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for data_prep_end_to_end.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = {name: read(folder) for name, read in TEXTS.items()}
        everything = [text for each in texts.values() for text in each]
        size = write_dclm(everything, folder / "raw_dclm")
        long_size = write_longwanjuan(texts["linux"] + texts["austen"], folder / "raw_longwanjuan")
        load = os.getloadavg()[0]
        print(f"{size / 1e6:.1f} MB of text, {len(everything):,} documents; {len(os.sched_getaffinity(0))} cores, load {load:.1f} before\n")
        print("| step | seconds | size | M a second | peak GB |\n| --- | ---: | ---: | ---: | ---: |")
        steps = Steps()
        tiny = "776m+gdn_nope_lh+{}+tiny"
        short_words = [tiny.format("pretrain_4k"), VOCABULARY]
        short = stage(steps, "dclm", folder / "raw_dclm", size, folder / "dclm", "0.01", [], short_words)
        long_words = [tiny.format("extend_32k"), VOCABULARY, "data.whole_documents=true", "validation.samples=1"]
        long_words += ["train.context=32768", "train.batch_tokens=32768", "train.tokens=32768"]
        whole = ["--whole-documents", "32768"]
        long = stage(steps, "longwanjuan", folder / "raw_longwanjuan", long_size, folder / "long", "0.3", whole, long_words)
        if arguments.full_size_maps:
            full_size_maps(steps, folder / "full")
        print(f"\n{short['tokens']:,} tokens of {short['documents']:,} documents; {long['tokens']:,} of {long['documents']:,} long ones")
        result = {"bytes": size, "load": load, "steps": steps.rows, "pretrain_4k": short, "extend_32k": long}
        (arguments.out / "data_prep_end_to_end.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
