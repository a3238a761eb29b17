"""python benchmarks/learning.py [PATTERN ...] [--jobs N] [--keep DIR] [--out DIR]

Trains recipes/quickstart.yaml with one pattern after the other (every mixer and layout of the first paper, unless named), the same tokens
each, and prints the validation losses side by side: a mixer that does not learn stands out. `make quickstart` must have prepared the data.
N runs go on side by side, one thread each. Writes learning.json into `--out` ($OUT, or this folder).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

EFFICIENT = ("rope", "swa", "gla", "gdn", "kda", "lightning", "mamba2", "rwkv7")
PATTERNS = ("rope", *(f"{mixer}_nope_{layout}" for mixer in EFFICIENT for layout in ("lh", "hh")), "hypenet_lightning", "swan_gpt")


def train(pattern: str, folder: Path) -> dict:
    """Train one pattern to its end; its losses in nats a token."""
    run_dir = folder / pattern
    recipe = f"recipes/quickstart.yaml+{pattern}" if pattern != "gdn_nope_lh" else "recipes/quickstart.yaml"
    words = [recipe, f"run_dir={run_dir}", "tracking.wandb=disabled"]
    if pattern == "swan_gpt":
        words.append("model.swa.window=128")  # 512 tokens are more than a sample has here
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    ended = subprocess.run([sys.executable, "-m", "launch", "train", *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"error: {' '.join(words)} ended with code {ended.returncode}: {ended.stderr[-2000:]}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    last = [line["loss"] for line in lines[-10:]]
    steps = sorted(line["step_seconds"] for line in lines[5:])
    return {
        "pattern": pattern,
        "tokens": lines[-1]["tokens"],
        "training_loss": sum(last) / len(last),
        "validation_loss": lines[-1]["validation_loss"],
        "median_step_seconds": steps[len(steps) // 2],
        "device": json.loads((run_dir / "events.jsonl").read_text().splitlines()[0])["device"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", default=PATTERNS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", Path(__file__).parent)))
    asked = parser.parse_args()
    os.chdir(ROOT)

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(asked.jobs) as pool:
        rows = list(pool.map(lambda pattern: train(pattern, asked.keep or Path(scratch)), asked.patterns))

    from hybrid_megatron.config import load_recipe
    from hybrid_megatron.evaluation.unigram import unigram_cross_entropy

    unigram = unigram_cross_entropy(load_recipe(["recipes/quickstart.yaml"]))
    (asked.out / "learning.json").write_text(json.dumps({"unigram": unigram, "runs": rows}, indent=1) + "\n")
    print(f"recipes/quickstart.yaml, {rows[0]['tokens']:,} tokens each on {rows[0]['device']}; unigram model {unigram:.3f} nats")
    print("| pattern | training loss | validation loss | below the unigram model |\n| --- | ---: | ---: | ---: |")
    for row in rows:
        below = unigram - row["validation_loss"]
        print(f"| `{row['pattern']}` | {row['training_loss']:.3f} | {row['validation_loss']:.3f} | {below:.3f} |")


if __name__ == "__main__":
    main()
