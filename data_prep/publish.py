"""Output that is either complete or not there.

A job writes into a hidden staging folder beside its output and renames the files into place at the end, manifests last. Whatever finished
output was there stays until that moment; a killed job leaves only the staging folder, which the next job removes.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from hybrid_megatron.errors import DataError


class Staging:
    """Context manager around the writing of output files of `directory`.

    Any OSError inside becomes a `DataError` about the output folder, so errors of reading have to be turned into their own `DataError`
    where they arise. Only one job at a time writes to a folder; with `beside_others` only one writes `name`, and others write other names.
    """

    def __init__(self, directory: Path, name: str, beside_others: bool = False):
        self.directory = directory
        self.folder = directory / f".{name}.partial"
        self.was_interrupted = False
        self._beside_others = beside_others
        self._lock: int | None = None
        self._created: list[Path] = []

    def __enter__(self) -> "Staging":
        with _explained(self.directory):
            self._created = _make_folder(self.directory)
            if not self._beside_others:
                self._lock = lock_folder(self.directory)
            self.was_interrupted = self.folder.exists()
            if self._beside_others:
                self._lock = _make_and_lock(self.folder)
                for left in self.folder.iterdir():
                    left.unlink()
            else:
                if self.was_interrupted:
                    shutil.rmtree(self.folder)
                self.folder.mkdir()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        if error is not None:
            with contextlib.suppress(OSError):  # only folders which this job made, and only while they are empty
                for folder in self._created:
                    folder.rmdir()
        if isinstance(error, OSError):
            raise output_error(self.directory, error) from None

    def path(self, name: str) -> Path:
        """Where to write the file that becomes `directory/name`."""
        return self.folder / name

    def write_text(self, name: str, text: str) -> None:
        """Write a small file, through to the disk."""
        with self.path(name).open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def publish(self, files: Sequence[str], last: Sequence[str] = ()) -> None:
        """Rename `files` into place, then `last` (manifests): at no moment does a manifest stand beside files that are not its own."""
        for name in last:
            (self.directory / name).unlink(missing_ok=True)
        for name in (*files, *last):
            os.replace(self.path(name), self.directory / name)
        descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def shared_folder(directory: Path) -> Iterator[None]:
    """Make `directory` and keep it from jobs that want it for themselves; others that share it may run beside. Errors as in `Staging`."""
    with _explained(directory):
        _make_folder(directory)
        lock = lock_folder(directory, shared=True)
        try:
            yield
        finally:
            if lock is not None:
                os.close(lock)


def _make_folder(directory: Path) -> list[Path]:
    """Make a folder; returns those that had been missing."""
    missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    return missing


@contextlib.contextmanager
def _explained(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise output_error(directory, error) from None


def lock_folder(directory: Path, shared: bool = False) -> int | None:
    """Take the folder for one job, or for those that share it: a descriptor to close at the end. Raises `DataError` if another job has it.

    None where the file system cannot lock folders, as some network file systems; renames alone still keep the output whole there.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno == errno.EWOULDBLOCK:
            raise DataError(f"{directory}: another data_prep job is writing there; wait for it or choose another --output") from None
        return None
    return descriptor


def _make_and_lock(folder: Path) -> int | None:
    """Make a staging folder, or take one that a killed job left. The job before may remove it until the lock is ours: then again."""
    while True:
        folder.mkdir(exist_ok=True)
        try:
            lock = lock_folder(folder)
        except FileNotFoundError:
            continue
        if lock is None:
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), folder.stat()):
                return lock
        os.close(lock)


def output_error(directory: Path, error: OSError) -> DataError:
    """What to tell of an output folder that cannot be written."""
    reason = error.strerror or str(error)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    mend = "free some space there" if full else "make it a folder you may write to"
    return DataError(f"{directory}: the output cannot be written ({reason}); {mend} or choose another --output")
