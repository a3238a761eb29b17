"""The folder of one run: who holds it, its config, its id, its events.

    config.yaml    the resolved recipe              checkpoints/   step_XXXXXXXX/, see checkpoint/
    metrics.jsonl  one line a step                  wandb/         wandb's own files
    events.jsonl   starts, saves, stops, ...        loss.png       training and validation loss
    RUN_ID         the wandb run id
"""

import dataclasses
import fcntl
import json
import secrets
import time
from pathlib import Path

from hybrid_megatron.config import RunConfig, load_recipe, save_config
from hybrid_megatron.errors import ConfigError, RunError

# What may differ when a run is resumed: it changes how the run is computed or watched, not what it computes. Data files are
# recognised by their contents (checkpoint/), so that a dataset may move.
_MAY_CHANGE = (
    "name", "run_dir", "parallel.", "tracking.", "checkpoint.", "validation.", "train.micro_batch",
    "data.train", "data.valid", "data.tokenizer", "data.cache_dir",
)  # fmt: skip


class RunFolder:
    """Opened by rank 0 alone, before any process group exists, and held until the process ends."""

    def __init__(self, config: RunConfig):
        """Create the folder or take up the one there. Raises RunError if another run holds it, ConfigError if it is another run's."""
        self.path = Path(config.run_dir)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "w")
        except OSError as error:
            raise RunError(f"run_dir={self.path}: cannot write there ({error.strerror}); give another with run_dir=PATH") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel drops it when the holder dies
        except OSError:
            raise RunError(
                f"run_dir={self.path}: another process is training in this folder; wait for it, stop it, or give another with run_dir=PATH"
            ) from None
        self._check_same_run(config)
        save_config(config, self._new("config.yaml"))
        self._put("config.yaml")
        if not (self.path / "RUN_ID").is_file():
            self._new("RUN_ID").write_text(secrets.token_hex(4) + "\n")
            self._put("RUN_ID")

    @property
    def run_id(self) -> str:
        return (self.path / "RUN_ID").read_text().strip()

    def event(self, kind: str, **facts) -> None:
        """Append one line to events.jsonl."""
        with open(self.path / "events.jsonl", "a") as file:
            file.write(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": kind, **facts}) + "\n")

    def close(self) -> None:
        self._lock.close()

    def _check_same_run(self, config: RunConfig) -> None:
        file = self.path / "config.yaml"
        if not file.is_file() or not any(self.path.glob("checkpoints/step_*")):
            return
        before, now = (_flat(dataclasses.asdict(each)) for each in (load_recipe([str(file)]), config))
        changed = [key for key in sorted(before | now) if not key.startswith(_MAY_CHANGE) and before.get(key) != now.get(key)]
        if changed:
            raise ConfigError(
                [f"{key}: this run has {before.get(key)}, the recipe now says {now.get(key)}" for key in changed]
                + [f"run_dir={self.path}: a run resumes only with the settings it began with; undo these or give another run_dir=PATH"]
            )

    def _new(self, name: str) -> Path:
        return self.path / f".{name}.new"

    def _put(self, name: str) -> None:
        self._new(name).replace(self.path / name)


def _flat(tree, prefix: str = "") -> dict:
    if isinstance(tree, dict):
        return {key: value for name, below in tree.items() for key, value in _flat(below, f"{prefix}{name}.").items()}
    return {prefix.rstrip("."): tree}
