"""python benchmarks/quickstart_layouts.py [--steps 20] [--out DIR]

Trains the first steps of recipes/quickstart.yaml under each layout of two and four processes and prints how far its losses are from those
of one process. Needs the data that `make quickstart` prepares. One thread a process; some minutes on two cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYOUTS = {
    "tensor 2": (2, ["parallel.tensor=2"]),
    "tensor 2 + sequence": (2, ["parallel.tensor=2", "parallel.sequence=true"]),
    "pipeline 2": (2, ["parallel.pipeline=2"]),
    "context 2": (2, ["parallel.context=2"]),
    "data 2": (2, []),
    "tensor 2 + sequence, pipeline 2": (4, ["parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2"]),
    "tensor 2, data 2": (4, ["parallel.tensor=2"]),
}


def first_losses(run_dir: Path, processes: int, overrides: list[str], steps: int) -> list[float]:
    """Losses of the first `steps` steps; the run is ended when they are logged."""
    start = [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    words = ["recipes/quickstart.yaml", f"run_dir={run_dir}", "tracking.wandb=disabled", "validation.interval_steps=1000000", *overrides]
    log = run_dir.with_suffix(".log")  # torchrun reports at length when it is ended
    with open(log, "w") as file:
        run = subprocess.Popen(
            [sys.executable, *start, "-m", "launch", "train", *words],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    metrics, lines = run_dir / "metrics.jsonl", []
    while len(lines) < steps:
        if run.poll() is not None:
            raise SystemExit(f"{log.read_text()}\nerror: {' '.join(words)} ended with code {run.returncode} after {len(lines)} steps")
        time.sleep(0.2)
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
    run.terminate()
    run.wait()
    return [json.loads(line)["loss"] for line in lines[:steps]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(), help="folder for quickstart_layouts.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        alone = first_losses(Path(folder) / "one", 1, [], arguments.steps)
        print(f"recipes/quickstart.yaml, first {arguments.steps} steps, last loss {alone[-1]:.4f}\n")
        print("| layout | processes | largest difference of a loss |\n| --- | ---: | ---: |", flush=True)
        differences = {}
        for i, (name, (processes, overrides)) in enumerate(LAYOUTS.items()):
            losses = first_losses(Path(folder) / str(i), processes, overrides, arguments.steps)
            differences[name] = max(abs(mine - theirs) for mine, theirs in zip(losses, alone, strict=True))
            print(f"| {name} | {processes} | {differences[name]:.1e} |", flush=True)
    (arguments.out / "quickstart_layouts.json").write_text(json.dumps(differences, indent=2) + "\n")


if __name__ == "__main__":
    main()
