"""Metrics of a run: `metrics.jsonl` always, wandb as its mirror, and one printed line now and then. Used by rank 0 alone."""

import contextlib
import json
import netrc
import os
import warnings
from pathlib import Path
from urllib.parse import urlsplit

from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.training.run_folder import RunFolder, writing


class Tracker:
    def __init__(self, config: RunConfig, folder: RunFolder, first_step: int):
        """`first_step` is the number of steps done: lines of later steps, written before the run was set back, are removed."""
        self.path = folder.path / "metrics.jsonl"
        with writing(self.path):
            _drop_after(self.path, first_step)
            self.file = open(self.path, "a")
        self.wandb = _start_wandb(config, folder)

    def log(self, metrics: dict[str, float]) -> None:
        """`metrics` holds `step`, the number of steps done with this one, and values by the names of the field. Raises RunError."""
        with writing(self.path):
            self.file.write(json.dumps(metrics) + "\n")
            self.file.flush()
        # against its own `step`, since wandb drops what does not rise above its internal one
        self._mirror(lambda run: run.log(metrics))

    def close(self, exit_code: int) -> None:
        with contextlib.suppress(OSError):  # a line that could not be written is tried again here, and was reported
            self.file.close()
        self._mirror(lambda run: run.finish(exit_code=exit_code))

    def _mirror(self, act) -> None:
        """A run does not end because its mirror fails."""
        if self.wandb is None:
            return
        try:
            act(self.wandb)
        except Exception as error:  # of wandb's own, of its service process, of the network or the disk
            warnings.warn(f"wandb failed ({_first_line(error)}), so it has no more of this run; metrics.jsonl has everything")
            self.wandb = None


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
        warnings.warn(
            "wandb is not installed, so this run is not mirrored there; metrics.jsonl has everything (tracking.wandb=disabled says so)"
        )
        return None
    mode = config.tracking.wandb
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or ("online" if _logged_in() else "offline")
    settings = wandb.Settings(silent=True, console="off")
    try:
        run = wandb.init(
            project=config.tracking.project,
            name=folder.path.name,
            id=folder.run_id,
            resume="allow",
            dir=str(folder.path),
            mode=mode,
            settings=settings,
        )
        run.define_metric("*", step_metric="step")
        return run
    except Exception as error:  # no network, no permission, a full disk: none of them is a reason not to train
        warnings.warn(f"wandb does not start ({_first_line(error)}), so this run is not mirrored there; metrics.jsonl has everything")
        return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _logged_in() -> bool:
    """Whether wandb would find a key: in the environment, or in the netrc file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
