"""Metrics of a run: `metrics.jsonl` always, wandb as its mirror, and one printed line now and then. Used by rank 0 alone."""

import json
import netrc
import os
import warnings
from pathlib import Path
from urllib.parse import urlsplit

from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.training.run_folder import RunFolder


class Tracker:
    def __init__(self, config: RunConfig, folder: RunFolder, first_step: int):
        """`first_step` is the number of steps done: lines of later steps, written before the run was set back, are removed."""
        self.path = folder.path / "metrics.jsonl"
        _drop_after(self.path, first_step)
        self.file = open(self.path, "a")
        self.wandb = _start_wandb(config, folder)

    def log(self, metrics: dict[str, float]) -> None:
        """`metrics` holds `step`, the number of steps done with this one, and values by the names of the field."""
        self.file.write(json.dumps(metrics) + "\n")
        self.file.flush()
        if self.wandb is not None:
            self.wandb.log(metrics)  # against its own `step`, since wandb drops what does not rise above its internal one

    def close(self, exit_code: int) -> None:
        self.file.close()
        if self.wandb is not None:
            self.wandb.finish(exit_code=exit_code)


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
    new.write_text("".join(json.dumps(line) + "\n" for line in kept))
    new.replace(path)


def _start_wandb(config: RunConfig, folder: RunFolder):
    """The wandb run with this folder's id, or None. Offline unless the user is logged in; a missing package is a warning."""
    if config.tracking.wandb == "disabled":
        return None
    try:
        import wandb
    except ImportError:
        warnings.warn("wandb is not installed, so this run is not mirrored there; metrics.jsonl has everything (tracking.wandb=disabled says so)")
        return None
    mode = config.tracking.wandb
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or ("online" if _logged_in() else "offline")
    settings = wandb.Settings(silent=True, console="off")
    run = wandb.init(
        project=config.tracking.project, name=folder.path.name, id=folder.run_id, resume="allow", dir=str(folder.path), mode=mode, settings=settings
    )  # fmt: skip
    run.define_metric("*", step_metric="step")
    return run


def _logged_in() -> bool:
    """Whether wandb would find a key: in the environment, or in the netrc file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
