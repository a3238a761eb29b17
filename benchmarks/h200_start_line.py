"""python benchmarks/h200_start_line.py [--model 776m|tiny] [--patterns rope gdn_nope_lh] [--steps 30] [--keep DIR] [--out DIR]

Trains 776m+rope+pretrain_4k and 776m+gdn_nope_lh+pretrain_4k for 30 steps each on one device, through `python -m launch train` as a
person would, and prints how fast the first step comes and how fast the later ones are. What differs from the recipes: 65,536 tokens a
step (2 micro-batches of 8 samples of 4,096) instead of 1M, 30 steps, made-up data (random documents over the 128,256 words: speed does
not depend on what they say), no validation, no wandb. A run is ended when its last measured step is logged, so no checkpoint is written.

`--model tiny` runs the same path in seconds on a CPU, to check this program. Writes start_line.json into `--out` ($OUT, or this folder).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

FIRST_MEASURED = 10
# Words of a recipe, tokens a sample, tokens a step, samples at once.
MODELS = {
    "776m": ("776m", 4096, 8 * 4096 * 2, 8),
    "tiny": ("376m", 128, 4 * 128 * 2, 4),
}
TINY = [
    "model.num_layers=4", "model.hidden_size=64", "model.num_heads=2", "model.head_dim=32", "model.ffn_size=96", "model.vocab_size=512",
    "train.precision=fp32",
]  # fmt: skip


def make_dataset(folder: Path, vocab: int, tokens: int) -> Path:
    """Random documents of 100 to 3,000 tokens, `tokens` in all, as data_prep writes them; returns the prefix."""
    from data_prep.indexed_dataset import IndexedDatasetWriter, token_dtype
    from data_prep.manifest import Manifest, manifest_path

    prefix = folder / "train"
    random = np.random.default_rng(0)
    writer = IndexedDatasetWriter(folder / "train.bin", folder / "train.idx", token_dtype(vocab))
    held = 0
    while held < tokens:
        words = random.integers(2, vocab, int(random.integers(100, 3000)))
        writer.add([0, *words.tolist(), 1])
        held += len(words) + 2
    tokenizer = {"name": "made-up", "kind": "none", "fingerprint": "sha256:" + "0" * 64, "vocab_size": vocab, "bos": 0, "eos": 1}
    manifest = Manifest.of(
        writer.finish(), tokenizer=tokenizer, adds_bos=True, adds_eos=True, source={"kind": "made", "inputs": []}, options={}
    )  # fmt: skip
    manifest_path(prefix).write_text(manifest.to_json())
    return prefix


def recipe_words(model: str, pattern: str, steps: int, data: Path, run_dir: Path) -> list[str]:
    fragment, context, batch_tokens, micro_batch = MODELS[model]
    return [
        f"{fragment}+{pattern}+pretrain_4k",
        f"run_dir={run_dir}", f"data.train={data}", "data.valid=null", "data.tokenizer=null",
        f"train.context={context}", f"train.batch_tokens={batch_tokens}", f"train.micro_batch={micro_batch}",
        f"train.tokens={10 * steps * batch_tokens}", f"schedule.warmup_tokens={steps * batch_tokens // 2}",
        f"checkpoint.interval_steps={10 * steps}", "tracking.wandb=disabled",
        *(TINY if model == "tiny" else []),
    ]  # fmt: skip


def train(words: list[str], run_dir: Path, steps: int) -> tuple[float, list[dict]]:
    """Seconds from the start of the process to the end of its first step, and the lines of metrics.jsonl of `steps` steps."""
    metrics = run_dir / "metrics.jsonl"
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "launch", "train", *words], cwd=ROOT)
    first, lines = None, []
    while len(lines) < steps:
        if process.poll() is not None:
            raise SystemExit(f"error: {' '.join(words)} ended with code {process.returncode} after {len(lines)} steps")
        time.sleep(0.02)
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        if lines and first is None:
            first = time.perf_counter() - began
    process.kill()
    process.wait()
    return first, [json.loads(line) for line in lines[:steps]]


def measure(model: str, pattern: str, steps: int, data: Path, folder: Path) -> dict:
    """One row of the table."""
    run_dir = folder / pattern
    words = recipe_words(model, pattern, steps, data, run_dir)
    first, lines = train(words, run_dir, steps)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    measured = [line for line in lines if line["step"] >= FIRST_MEASURED]
    seconds = [line["step_seconds"] for line in measured]
    median = statistics.median(seconds)
    batch_tokens = MODELS[model][2]
    middle = min(measured, key=lambda line: abs(line["step_seconds"] - median))
    return {
        "recipe": words[0],
        "device": events[0]["device"],
        "first_step_from_process_start_seconds": first,
        "first_step_seconds": lines[0]["step_seconds"],
        "median_step_seconds": median,
        "slowest_step_seconds": max(seconds),
        "tokens_per_second_per_gpu": batch_tokens / median,
        "mfu": middle["mfu"] * middle["step_seconds"] / median if "mfu" in middle else None,
        "peak_memory_gib": lines[-1]["peak_memory_gib"],
        "first_loss": lines[0]["lm_loss"],
        "final_loss": lines[-1]["lm_loss"],
        "steps": lines[-1]["step"],
        "words": words,
    }


def table(rows: list[dict], model: str, steps: int) -> str:
    _, context, batch_tokens, micro_batch = MODELS[model]
    text = [
        f"{rows[0]['device']}, {batch_tokens:,} tokens a step = {batch_tokens // context // micro_batch} micro-batches of {micro_batch} "
        f"samples of {context:,}; medians of steps {FIRST_MEASURED} to {steps}",
        "",
        "| recipe | process start to first step | first step | median step | tokens/s/GPU | MFU | peak memory | final loss |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        mfu = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
        text.append(
            f"| {row['recipe']} | {row['first_step_from_process_start_seconds']:.1f} s | {row['first_step_seconds']:.1f} s "
            f"| {row['median_step_seconds'] * 1e3:.0f} ms | {row['tokens_per_second_per_gpu']:,.0f} | {mfu} "
            f"| {row['peak_memory_gib']:.1f} GiB | {row['final_loss']:.3f} |"
        )
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="776m")
    parser.add_argument("--patterns", nargs="+", default=["rope", "gdn_nope_lh"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--keep", type=Path, help="folder for the data and run folders; a temporary one otherwise")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    arguments = parser.parse_args()
    if arguments.steps <= FIRST_MEASURED:
        parser.error(f"--steps must be more than {FIRST_MEASURED}: the first ones are not measured")
    model, steps = arguments.model, arguments.steps
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        vocab = 512 if model == "tiny" else 128_256
        data = make_dataset(folder, vocab, (steps + 1) * MODELS[model][2])
        from hybrid_megatron.config import load_recipe
        from hybrid_megatron.data import build_index_caches

        build_index_caches(load_recipe(recipe_words(model, arguments.patterns[0], steps, data, folder / "unused")))
        rows = [measure(model, pattern, steps, data, folder) for pattern in arguments.patterns]
    print("\n" + table(rows, model, steps))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "start_line.json").write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
