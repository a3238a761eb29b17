"""Metrics of a run: `metrics.jsonl` always, wandb as its mirror (wandb_mirror.py). Used by rank 0 alone."""

import contextlib
import json
import os
from pathlib import Path

from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.training.run_folder import RunFolder, writing
from hybrid_megatron.training.wandb_mirror import WandbMirror


class Tracker:
    def __init__(self, config: RunConfig, folder: RunFolder, first_step: int, facts: dict):
        """`first_step` is the number of steps done: lines of later steps, written before the run was set back, are removed."""
        self.path = folder.path / "metrics.jsonl"
        with writing(self.path):
            _drop_after(self.path, first_step)
            self.file = open(self.path, "a")
        self.wandb = WandbMirror(config, folder, facts, lambda: read_metrics(self.path))

    def log(self, metrics: dict[str, float]) -> None:
        """`metrics` holds `step`, the number of steps done with this one, and values by the names of the field. Raises RunError."""
        with writing(self.path):
            self.file.write(json.dumps(metrics) + "\n")
            self.file.flush()
        self.wandb.log(metrics)

    def make_durable(self) -> None:
        """Before a checkpoint is: what a node loses with its power must not be lines that belong to one."""
        with contextlib.suppress(OSError):  # a full disk is found out by the next line
            os.fsync(self.file.fileno())

    def close(self, exit_code: int) -> None:
        with contextlib.suppress(OSError):  # a line that could not be written is tried again here, and was reported
            self.file.close()
        self.wandb.finish(exit_code)


def read_metrics(path: Path) -> list[dict]:
    """The lines of metrics.jsonl; a last line cut off by a kill is left out."""
    lines = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def _drop_after(path: Path, step: int) -> None:
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    new = path.with_name(".metrics.jsonl.new")
    with open(new, "w") as file:
        file.write("".join(json.dumps(line) + "\n" for line in kept))
        file.flush()
        os.fsync(file.fileno())  # before it takes the place of what is durable
    new.replace(path)
