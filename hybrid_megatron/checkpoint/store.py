"""The folder `checkpoints/` of a run: which checkpoints are complete, which is the newest, which may go.

A checkpoint is written into `step_XXXXXXXX.partial` and renamed to `step_XXXXXXXX` when all of it, `complete.json` last, is on disk. So
what has the final name is whole, whenever the process was killed; what has another name is left over and is removed.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from hybrid_megatron.errors import CheckpointError

MARKER = "complete.json"


@dataclass(frozen=True)
class Progress:
    """How far a run was when a checkpoint was taken."""

    step: int
    """Optimizer steps done."""
    tokens: int
    layout: dict[str, int]
    """Sizes of the parallel layout that wrote it."""
    data: str
    """Fingerprint of the training data."""


class CheckpointStore:
    def __init__(self, run_dir: Path):
        self.path = Path(run_dir) / "checkpoints"

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first: all with a final name. One whose marker is gone is damaged, and reading it says so."""
        found = [path for path in self.path.glob("step_*") if path.name[5:].isdigit()]
        return sorted(found, key=lambda path: int(path.name[5:]))

    def newest(self) -> Path | None:
        return next(reversed(self.complete()), None)

    def begin(self, name: str) -> Path:
        """An empty folder to write into, `NAME.partial`."""
        partial = self.path / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def finish(self, partial: Path, progress: Progress) -> Path:
        """Write the marker, make everything durable, and give the folder its name."""
        (partial / MARKER).write_text(json.dumps(asdict(progress), indent=1) + "\n")
        for path in (*partial.iterdir(), partial):
            _fsync(path)
        final = partial.with_suffix("")
        if final.exists():  # the same step saved before, by a run that was then set back
            self._remove(final)
        partial.rename(final)
        _fsync(self.path)
        return final

    def _remove(self, checkpoint: Path) -> None:
        leaving = checkpoint.with_name(f"{checkpoint.name}.old.partial")  # so that a kill in the middle leaves no half checkpoint
        checkpoint.rename(leaving)
        shutil.rmtree(leaving, ignore_errors=True)

    def discard(self, partial: Path) -> None:
        shutil.rmtree(partial, ignore_errors=True)

    def tidy(self, keep_last: int | None = None) -> None:
        """Remove what was left over by killed saves, and all but the newest `keep_last` complete checkpoints."""
        for path in self.path.glob("*.partial"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.complete()[:-keep_last] if keep_last else []:
            self._remove(path)


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


def read_progress(checkpoint: Path, then: str | None = None) -> Progress:
    """Raises CheckpointError, which ends with the advice `then`, or with how to go on in the checkpoint's own run."""
    try:
        progress = Progress(**json.loads((checkpoint / MARKER).read_text()))
        if [type(value) for value in asdict(progress).values()] != [int, int, dict, str]:
            raise ValueError("a value is of the wrong type")
        return progress
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{checkpoint / MARKER}: not readable ({reason}); {then or way_out(checkpoint)}") from None


def way_out(checkpoint: Path) -> str:
    """What to do about a damaged checkpoint."""
    older = [path for path in CheckpointStore(checkpoint.parent.parent).complete() if path.name < checkpoint.name]
    then = f"resume from {older[-1].name}" if older else "begin this run anew"
    return f"move {checkpoint} away to {then}"


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
