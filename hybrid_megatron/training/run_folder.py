"""The folder of one run: who holds it, its config, its id, its events.

config.yaml    the resolved recipe              checkpoints/   step_XXXXXXXX/, see checkpoint/
metrics.jsonl  one line a step                  wandb/         wandb's own files
events.jsonl   starts, saves, stops, ...        loss.png       training and validation loss
RUN_ID         the wandb run id                 logs/          heartbeats/, stacks/, see heartbeat.py, watchdog.py
.lock.N        who holds the folder, see folder_lock.py
"""

import contextlib
import dataclasses
import json
import os
import secrets
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from hybrid_megatron.checkpoint.store import CheckpointStore, read_progress
from hybrid_megatron.config import RunConfig, as_written, load_recipe, save_config
from hybrid_megatron.config.validate_stability import skipped_until
from hybrid_megatron.data.datasets import train_fingerprint
from hybrid_megatron.errors import ConfigError, RunError, UserError
from hybrid_megatron.folder_lock import FolderLock, Held
from hybrid_megatron.parallel import ParallelState
from hybrid_megatron.training.heartbeat import remove_heartbeats

# What may differ when a run is resumed: it changes how the run is computed or watched, not what it computes. Data files are
# recognised by their contents (checkpoint/), so that a dataset may move.
_MAY_CHANGE = (
    "name", "run_dir", "parallel.", "tracking.", "checkpoint.", "validation.", "watchdog.", "train.micro_batch", "train.recompute",
    "model.attention.backend", "model.kernels.", "data.train", "data.valid", "data.tokenizer", "data.cache_dir", "data.repeat",
    "stability.skip_steps",  # behind the newest checkpoint: `_other_past`
)  # fmt: skip


_NAMED = 3
"""Differences that one sentence names."""


class RunFolder:
    """Held by rank 0 alone until it is closed or the process ends; `open_run_folder` opens it."""

    def __init__(self, path: Path):
        """Create the folder or take up the one there, and change nothing in it but heartbeats. Raises RunError if another run holds it."""
        self.path = path
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.path, say=lambda text: print(text, flush=True), lost=_end_at_once)
        except OSError as error:
            raise RunError(f"run_dir={self.path}: cannot write there ({error.strerror}); give another with run_dir=PATH") from None
        except Held as other:
            raise RunError(
                f"run_dir={self.path}: another process is training in this folder ({other}); "
                "wait for it, stop it, or give another with run_dir=PATH"
            ) from None
        remove_heartbeats(self.path)

    @property
    def holding(self) -> int:
        """Of how many times this folder was held, this is the last."""
        return self._lock.number

    def record(self, config: RunConfig) -> None:
        """Write config.yaml, and RUN_ID if there is none: once everything that could refuse this run has accepted it."""
        if (before := _windows_before(self.path, config)) is not None:
            self.event("skip_steps_changed", before=before, now=config.stability.skip_steps)
        with writing(self.path / "config.yaml"):
            save_config(config, self._new("config.yaml"))
            self._put("config.yaml")
        with writing(self.path / "RUN_ID"):
            if not (self.path / "RUN_ID").is_file():
                self._new("RUN_ID").write_text(secrets.token_hex(4) + "\n")
                self._put("RUN_ID")

    @property
    def run_id(self) -> str:
        return (self.path / "RUN_ID").read_text().strip()

    def event(self, kind: str, **facts) -> None:
        append_event(self.path, kind, **facts)

    def close(self) -> None:
        self._lock.release()

    def _new(self, name: str) -> Path:
        return self.path / f".{name}.new"

    def _put(self, name: str) -> None:
        self._new(name).replace(self.path / name)


def append_event(run_dir: Path, kind: str, **facts) -> None:
    """Append one line to events.jsonl. A run does not end because that fails."""
    path = run_dir / "events.jsonl"
    try:
        with open(path, "a") as file:
            file.write(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": kind, **facts}) + "\n")
    except OSError as error:
        warnings.warn(f"{path}: the event {kind!r} cannot be written ({error.strerror})")


def _end_at_once(sentence: str) -> None:
    """Two runs in one folder spoil it, so this one writes nothing more."""
    print(f"error: {sentence}; this process ends", file=sys.__stderr__, flush=True)
    os._exit(1)


@contextlib.contextmanager
def open_run_folder(config: RunConfig, state: ParallelState) -> Iterator[RunFolder | None]:
    """The folder on rank 0, None on the others; all raise RunError if rank 0 cannot have it. Collective."""
    folder = None
    try:
        with state.together():
            if state.rank == 0:
                folder = RunFolder(Path(config.run_dir))
        yield folder
    finally:
        if folder is not None:
            folder.close()


def check_same_run(config: RunConfig) -> None:
    """Raise ConfigError with every difference if the run folder belongs to a run that computes something else. Only reads."""
    folder = Path(config.run_dir)
    file = folder / "config.yaml"
    begun = any(folder.glob("checkpoints/step_*"))
    if not file.is_file():
        if found := "checkpoints" if begun else "metrics.jsonl" if (folder / "metrics.jsonl").is_file() else "":
            raise RunError(
                f"{file}: missing, though the folder has {found}, so it is not known which settings they belong to; put the file back, "
                "or give another run_dir=PATH"
            )
        return
    earlier = load_recipe([str(file)])
    before, now = (_flat(each) for each in (earlier, config))
    changed = [key for key in sorted(now) if not key.startswith(_MAY_CHANGE) and before[key] != now[key]]
    if not begun:  # the same recipe begins anew; another would write over the metrics and go on in the wandb run of this one
        if changed:
            told = ", ".join(f"{key} {as_written(before[key])} there and {as_written(now[key])} here" for key in changed[:_NAMED])
            more = f", and {len(changed) - _NAMED} settings more" if len(changed) > _NAMED else ""
            raise ConfigError(
                f"run_dir={folder}: it holds a run of another recipe that has no checkpoint yet ({told}{more}); give another run_dir=PATH, "
                "or remove this folder"
            )
        return
    problems = [f"{key}: this run has {as_written(before[key])}, the recipe now says {as_written(now[key])}" for key in changed]
    if changed:
        problems += _other_data(config)
        problems += [f"run_dir={folder}: a run resumes only with the settings it began with; undo these or give another run_dir=PATH"]
    problems = _other_past(earlier, config) + problems
    if problems:
        raise ConfigError(problems)


def _other_past(earlier: RunConfig, config: RunConfig) -> list[str]:
    """One sentence if the two leave out other batches of the steps that the newest checkpoint has done."""
    newest = CheckpointStore(config.run_dir).newest()
    done = int(newest.name.removeprefix("step_")) if newest is not None else 0
    changed = skipped_until(earlier, done) ^ skipped_until(config, done)
    if not changed:
        return []
    so_far = earlier.stability.skip_steps
    return [
        f"stability.skip_steps={config.stability.skip_steps}: this run has done step {min(changed)} with {so_far} (newest checkpoint: "
        f"{newest}); repeat stability.skip_steps={str(so_far).replace(' ', '')}, and change only steps from {done + 1} on. To go further "
        f"back, move the checkpoints later than step {min(changed) - 1} away"
    ]


def _windows_before(folder: Path, config: RunConfig) -> list[list[int]] | None:
    """`stability.skip_steps` of a run that has checkpoints and is about to go on with others; None if it is not."""
    file = folder / "config.yaml"
    if not file.is_file() or CheckpointStore(folder).newest() is None:
        return None
    before = load_recipe([str(file)]).stability.skip_steps
    return before if before != config.stability.skip_steps else None


def _other_data(config: RunConfig) -> list[str]:
    """One more difference where the training data is another one too; what cannot be read is no difference, and is said when it is used."""
    newest = CheckpointStore(config.run_dir).newest()
    with contextlib.suppress(UserError):
        if newest and (trained_on := read_progress(newest).data) != (now := train_fingerprint(config)):
            return [f"data.train: this run has data of fingerprint {trained_on[:12]}, {config.data.train} now has {now[:12]}"]
    return []


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """An OSError inside becomes a RunError about this file."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); mend that and run the same command again to resume") from None


def _flat(settings, prefix: str = "") -> dict[str, object]:
    """section.key -> its value."""
    if not dataclasses.is_dataclass(settings):
        return {prefix.rstrip("."): settings}
    parts = [(f"{prefix}{field.name}.", getattr(settings, field.name)) for field in dataclasses.fields(settings)]
    return {key: value for name, below in parts for key, value in _flat(below, name).items()}
