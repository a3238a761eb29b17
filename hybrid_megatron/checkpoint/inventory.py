"""The checkpoints of a run folder as a person sees them: list, verify, prune. Needs no torch, so that it is quick on a login node."""

import contextlib
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hybrid_megatron.checkpoint.form import PERMANENT, ROLLING
from hybrid_megatron.checkpoint.integrity import check_hashes, damages, lacks_files
from hybrid_megatron.checkpoint.store import MARKER, CheckpointStore, Progress, is_of_a_step, read_progress
from hybrid_megatron.command_line import pasted
from hybrid_megatron.errors import CheckpointError, RunError
from hybrid_megatron.folder_lock import FolderLock, Held, holder_of


@dataclass(frozen=True)
class Entry:
    path: Path
    progress: Progress | None
    """None where there is no marker that can be read."""
    status: str
    """complete: resuming takes it. kept: it has another name than that of a step. damaged: set aside by a run that could not read it.
    unfinished: what a save or a removal left over, or one going on. no marker, files missing: it has a complete one's name and is none;
    whether files that are there are whole, `verify` says."""
    size: int
    """Bytes on disk."""
    age: float
    """Seconds since it was completed."""

    def as_json(self) -> dict:
        told = {"name": self.path.name, "status": self.status, "bytes": self.size, "age_seconds": round(self.age)}
        progress = self.progress
        return told if progress is None else told | {key: getattr(progress, key) for key in ("step", "tokens", "form", "layout", "data")}


def entries(run_dir: Path) -> list[Entry]:
    """All that lies in the folder of checkpoints, by name. Raises CheckpointError if there is no such folder."""
    return [_entry(path) for path in sorted(_folder(run_dir).iterdir()) if path.is_dir()]


def _entry(path: Path) -> Entry:
    progress = None
    with contextlib.suppress(CheckpointError):
        progress = read_progress(path)
    size, newest = 0, 0.0
    with contextlib.suppress(FileNotFoundError):  # retention of a run may be removing it
        found = [file.stat() for file in path.iterdir()]
        size, newest = sum(each.st_size for each in found), max((each.st_mtime for each in found), default=time.time())
    return Entry(path, progress, _status(path, progress), size, max(time.time() - newest, 0.0))


def _status(path: Path, progress: Progress | None) -> str:
    if path.name.endswith(".partial"):
        return "unfinished"
    if ".damaged" in path.name:
        return "damaged"
    if progress is None:
        return "no marker"
    if lacks_files(path):
        return "files missing"
    return "complete" if is_of_a_step(path) else "kept"


def named(run_dir: Path, name: str) -> Path:
    """Raises CheckpointError if the run folder has no checkpoint of this name."""
    path = _folder(run_dir) / name
    if Path(name).name != name or not path.is_dir():
        held = ", ".join(entry.path.name for entry in entries(run_dir)) or "none"
        raise CheckpointError(f"{path}: there is no such checkpoint; the run has {held}")
    return path


def problems(checkpoint: Path) -> list[str]:
    """A sentence for everything that is wrong with it: its marker, and each file that is missing or not as it was written."""
    try:
        read_progress(checkpoint)
    except CheckpointError as error:
        marker = str(checkpoint / MARKER)
        return [str(error), *(problem for problem in damages(checkpoint) if not problem.startswith(marker))]
    return list(damages(checkpoint))


@dataclass(frozen=True)
class Rules:
    """Which checkpoints `prune` removes; what no rule speaks of stays, and the newest whole one stays in any case."""

    keep: int | None = None
    """Rolling ones kept, the newest."""
    permanent_every: int | None = None
    """Permanent ones are kept where this divides the step."""
    damaged: bool = False
    """Whether those go that a run set aside."""

    def remove(self, held: list[Entry]) -> list[Entry]:
        whole = [entry for entry in held if entry.status == "complete"]
        rolling = [entry for entry in whole if entry.progress.form == ROLLING]
        leaving = [] if self.keep is None else rolling[: len(rolling) - self.keep]
        if self.permanent_every is not None:
            permanent = [entry for entry in whole if entry.progress.form == PERMANENT]
            leaving += [entry for entry in permanent if entry.progress.step % self.permanent_every]
        if self.damaged:
            leaving += [entry for entry in held if entry.status == "damaged"]
        return leaving


def prune(run_dir: Path, rules: Rules, dry_run: bool = False) -> list[Entry]:
    """Remove what the rules say; returns it. Raises RunError while a run holds the folder, CheckpointError if no checkpoint is whole.

    The newest whole one is found by its hashes: a damaged one in its place would cost the run.
    """
    if dry_run:
        if holder_of(run_dir) is not None:
            raise _run_is_training(run_dir)
        return _leaving(run_dir, rules)
    with _nobody_trains_in(run_dir):
        leaving = _leaving(run_dir, rules)
        for entry in leaving:
            CheckpointStore(run_dir).remove(entry.path)
    return leaving


def _leaving(run_dir: Path, rules: Rules) -> list[Entry]:
    held, stays = entries(run_dir), _newest_whole(run_dir)
    return [entry for entry in rules.remove(held) if entry.path != stays]


def _newest_whole(run_dir: Path) -> Path:
    for path in reversed(CheckpointStore(run_dir).complete()):
        with contextlib.suppress(CheckpointError):
            read_progress(path)
            check_hashes(path)
            return path
    raise CheckpointError(
        f"{_folder(run_dir)}: none of its checkpoints is whole, so none is removed; "
        f"{pasted('launch', 'checkpoint', 'verify', run_dir)} says why"
    )


@contextlib.contextmanager
def _nobody_trains_in(run_dir: Path) -> Iterator[None]:
    """The lock that a run holds on its folder, held for as long as checkpoints are removed."""
    try:
        lock = FolderLock(run_dir, say=print, lost=warnings.warn)
    except Held:
        raise _run_is_training(run_dir) from None
    except OSError as error:
        raise RunError(f"{run_dir}: cannot write there ({error.strerror}), so nothing can be removed") from None
    try:
        yield
    finally:
        lock.release()


def _run_is_training(run_dir: Path) -> RunError:
    return RunError(f"{run_dir}: a run is training in this folder, and removes checkpoints itself; prune when it has ended")


def _folder(run_dir: Path) -> Path:
    folder = CheckpointStore(run_dir).path
    if not folder.is_dir():
        raise CheckpointError(f"{run_dir}: it has no folder checkpoints/; give the folder of a run that has saved one")
    return folder
