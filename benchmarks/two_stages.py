"""python benchmarks/two_stages.py [--keep DIR] [--out DIR] [--small]

Two stages on the quickstart's real corpus: recipes/quickstart.yaml at 256 tokens a sample, then from its checkpoint at 1,024 tokens a
sample, once with the plain loss and once with LongCE. All three are evaluated on the same held-out tokens at 1,024 and 4,096 a sample,
and their losses by position are drawn over each other. `make quickstart` must have prepared the data. Writes two_stages.json and
two_stages.png into `--out` ($OUT, or this folder). `--small` spends a few steps only, to check this program.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPE = "recipes/quickstart.yaml"
SHORT, LONG = 256, 1024
# The second stage: weights of the first, everything else its own.
SECOND = [
    f"train.context={LONG}", "train.micro_batch=2", "train.tokens=204_800", "optimizer.peak_lr=1.0e-3", "optimizer.weight_decay=0",
    "schedule.warmup_tokens=40_960", "validation.samples=32",
]  # fmt: skip
LONGCE = ["longce.enabled=true", f"longce.window={SHORT}", "longce.stride=128"]


def command(*words: str) -> None:
    print("+ python -m", *words, flush=True)
    ended = subprocess.run([sys.executable, "-m", *words], cwd=ROOT)
    if ended.returncode:
        raise SystemExit(ended.returncode)


def evaluated(run_dir: Path) -> dict:
    """The evaluation of a run's newest checkpoint, as `launch evaluate` wrote it."""
    command("launch", "evaluate", str(run_dir), f"lengths=[{LONG}, {4 * LONG}]", "tokens=65_536", "name=two_stages")
    [file] = run_dir.glob("evaluation/*/two_stages.json")
    return json.loads(file.read_text())


def draw(evaluations: dict[str, dict], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    for axes, length in zip(figure.subplots(1, 2), (LONG, 4 * LONG)):
        for name, evaluation in evaluations.items():
            [line] = [line for line in evaluation["lengths"] if line["length"] == length]
            edges, loss = line["positions"]["edges"], line["positions"]["loss"]
            middles = [math.sqrt((begin + 1) * end) for begin, end in zip(edges, edges[1:])]
            axes.plot(middles, loss, label=f"{name}: {line['loss']:.3f} nats")
        for context in (SHORT, LONG):
            axes.axvline(context, ls="--", color="gray")
        axes.set(xscale="log", xlabel=f"position, in samples of {length:,} tokens", ylabel="nats per token")
        axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", Path(__file__).parent)))
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (asked.keep or Path(scratch)).resolve()
        first, plain, weighted = (folder / name for name in ("short", "long", "long_longce"))
        few = ["train.tokens=20_480", "schedule.warmup_tokens=8_192"] if asked.small else []
        command("data_prep", "build-cache", RECIPE, *SECOND, *few)
        command("launch", "train", RECIPE, f"run_dir={first}", "tracking.wandb=disabled", *few)
        for run_dir, more in ((plain, []), (weighted, LONGCE)):
            command("launch", "train", RECIPE, f"run_dir={run_dir}", f"init_from={first}", "tracking.wandb=disabled", *SECOND, *more, *few)
        evaluations = {
            f"{SHORT} tokens": evaluated(first),
            f"then {LONG:,}": evaluated(plain),
            f"then {LONG:,} with LongCE": evaluated(weighted),
        }
    (asked.out / "two_stages.json").write_text(json.dumps(evaluations, indent=1) + "\n")
    draw(evaluations, asked.out / "two_stages.png")
    print(f"\n| trained on | {LONG:,} tokens | {4 * LONG:,} tokens |\n| --- | ---: | ---: |")
    for name, evaluation in evaluations.items():
        print(f"| {name} | " + " | ".join(f"{line['loss']:.4f}" for line in evaluation["lengths"]) + " |")


if __name__ == "__main__":
    main()
