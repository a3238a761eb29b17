"""The folder `checkpoints/` of a run: which checkpoints are complete, which is the newest, which may go.

A checkpoint is written into `step_XXXXXXXX.partial` and renamed to `step_XXXXXXXX` when all of it, `complete.json` last, is on disk. So
what has the final name is whole, whenever the process was killed; what ends in `.partial` is left over and is removed. One that was
damaged later is moved to `step_XXXXXXXX.damaged`, out of the way of the next save of that step, and stays there.
"""

import itertools
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from hybrid_megatron.checkpoint.form import OPTIMIZER_SHARDING, PERMANENT, ROLLING
from hybrid_megatron.errors import CheckpointError

MARKER = "complete.json"


@dataclass(frozen=True)
class Progress:
    """How far a run was when a checkpoint was taken, and how it was written: what its marker says."""

    step: int
    """Optimizer steps done."""
    tokens: int
    layout: dict[str, int]
    """Sizes of the parallel layout that wrote it."""
    data: str
    """Fingerprint of the training data."""
    form: str = PERMANENT
    """rolling or permanent (form.py); markers that do not say are of the time when all were permanent."""

    def as_marker(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


class CheckpointStore:
    def __init__(self, run_dir: Path):
        self.path = Path(run_dir) / "checkpoints"

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first: all with a final name. One whose marker is gone is damaged, and reading it says so."""
        return sorted(filter(is_of_a_step, self.path.glob("step_*")), key=lambda path: int(path.name[5:]))

    def newest(self) -> Path | None:
        return next(reversed(self.complete()), None)

    def begin(self, name: str) -> Path:
        """An empty folder to write into, `NAME.partial`."""
        partial = self.path / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def finish(self, partial: Path, marker: str) -> Path:
        """Write the marker, make everything durable, and give the folder its name."""
        (partial / MARKER).write_text(marker)
        for path in (*partial.iterdir(), partial):
            _fsync(path)
        final = partial.with_suffix("")
        before = self._leaving(final) if final.exists() else None  # of the same step, by a run that was then set back
        partial.rename(final)
        _fsync(self.path)
        if before is not None:
            self.discard(before)
        return final

    def discard(self, partial: Path) -> None:
        shutil.rmtree(partial, ignore_errors=True)

    def retire(self, keep_last: int) -> list[Path]:
        """Take the rolling checkpoints that have `keep_last` newer ones out of the store; returns the folders, which are to be discarded.

        Permanent ones stay, and so does what cannot be read.
        """
        return [self._leaving(path) for path in self.complete()[:-keep_last] if form_of(path) == ROLLING]

    def tidy(self, keep_last: int | None = None) -> None:
        """Remove what was left over by killed saves, and, if `keep_last` is given, what retention lets go."""
        for path in (*self.path.glob("*.partial"), *(self.retire(keep_last) if keep_last else [])):
            self.discard(path)

    def set_aside(self, checkpoint: Path) -> Path:
        """Move a damaged checkpoint out of the way, to a name that resuming and retention pass over."""
        names = (f"{checkpoint.name}.damaged{f'_{count}' if count > 1 else ''}" for count in itertools.count(1))
        aside = next(path for name in names if not (path := checkpoint.with_name(name)).exists())
        checkpoint.rename(aside)
        return aside

    def remove(self, checkpoint: Path) -> None:
        self.discard(self._leaving(checkpoint))

    def _leaving(self, checkpoint: Path) -> Path:
        """Renamed as a leftover, so that a kill in the middle of its removal leaves no half checkpoint."""
        return checkpoint.rename(checkpoint.with_name(f"{checkpoint.name}.old.partial"))


def is_of_a_step(path: Path) -> bool:
    """Whether resuming takes a checkpoint of this name."""
    return path.name.startswith("step_") and path.name[5:].isdigit()


def checkpoint_at(path: Path) -> Path:
    """The checkpoint that `path` names: a checkpoint's own folder, or the newest complete one of a run folder. Raises CheckpointError."""
    if (path / MARKER).is_file() and path.suffix != ".partial":
        return path
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist; give a run folder or one of its checkpoints")
    newest = CheckpointStore(path).newest()
    if newest is None:
        raise CheckpointError(f"{path}: it is neither a complete checkpoint nor a run folder with one; give one of these")
    return newest


def read_progress(checkpoint: Path) -> Progress:
    """What the marker says. Raises CheckpointError."""
    try:
        progress = Progress(**json.loads((checkpoint / MARKER).read_text()))
        if [type(value) for value in asdict(progress).values()] != [int, int, dict, str, str] or progress.form not in OPTIMIZER_SHARDING:
            raise ValueError("a value is of the wrong type")
        return progress
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{checkpoint / MARKER}: not readable ({reason})") from None


def form_of(checkpoint: Path) -> str | None:
    """rolling, permanent, or None where the marker cannot be read."""
    try:
        return read_progress(checkpoint).form
    except CheckpointError:
        return None


def forms_of(checkpoints: Iterable[Path]) -> list[tuple[Path, str | None]]:
    return [(path, form_of(path)) for path in checkpoints]


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
