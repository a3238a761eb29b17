"""Who holds a run folder: never two runs in one, and a dead holder does not keep it.

RUN_DIR/.lock.N names the holder, who touches it every RENEW_SECONDS. Another takes the folder by creating .lock.N+1, which exactly one can
(O_EXCL; flock is not to be relied on: some shared file systems have none, some keep it within a node), once the holder has given it back,
is dead as its own machine sees it, or has not touched it for STALE_SECONDS. A holder that finds a lock after its own has lost the folder
and must end.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

RENEW_SECONDS = 5.0
STALE_SECONDS = 60.0
_LONG_DEAD_SECONDS = 3600.0
"""Beyond any difference of clocks: what has not been touched for so long needs no watching."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a run folder: rank 0 of a run."""

    host: str
    pid: int
    job: str | None
    """Slurm's job id, if it runs in a job."""
    since: str
    machine: str | None
    """Boot and PID namespace in which `pid` means something; None where the system does not tell."""
    started: str | None
    """When the process started, by that machine's count: tells it from a later one of the same pid."""

    @staticmethod
    def this_process() -> "Holder":
        job, now = os.environ.get("SLURM_JOB_ID"), time.strftime("%Y-%m-%dT%H:%M:%S%z")
        return Holder(socket.gethostname(), os.getpid(), job, now, _machine(), _started(os.getpid()))

    def is_alive(self) -> bool | None:
        """None: it ran on another machine, so this one cannot tell."""
        if self.machine is None or (self.host, self.machine) != (socket.gethostname(), _machine()):
            return None
        return _started(self.pid) == self.started

    def __str__(self) -> str:
        job = f", Slurm job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"


class Held(Exception):
    """Another holds the folder; `str` says who."""


def holder_of(run_dir: Path) -> Holder | None:
    """Who trains in this folder now. None: nobody, or a process of another machine without a sign of life for STALE_SECONDS."""
    lock = _newest_lock(Path(run_dir))
    if lock is None:
        return None
    alive = lock.is_held()
    if alive is None:
        alive = time.time() - lock.touched_ns / 1e9 < STALE_SECONDS
    return lock.holder if alive else None


class FolderLock:
    """Held from construction until `release` or the end of the process."""

    def __init__(
        self,
        folder: Path,
        say: Callable[[str], None],
        lost: Callable[[str], None],
        renew_seconds: float = RENEW_SECONDS,
        stale_seconds: float = STALE_SECONDS,
    ):
        """Take the folder, if need be after waiting to see that a holder on another machine is dead, which `say` says.

        Raises Held if its holder is alive, OSError if nothing can be written there. `lost` is called, in a thread, with one sentence if
        another takes the folder over.
        """
        self.folder, self.renew_seconds, self.stale_seconds = folder, renew_seconds, stale_seconds
        self._say, self._lost, self._holder = say, lost, Holder.this_process()
        self.number = self._acquire()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="run folder lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._over.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            if self._lost_to() is None:
                self._write(os.O_CREAT | os.O_TRUNC, released=True)

    def _acquire(self) -> int:
        watched, since = None, 0.0
        while True:
            lock = _newest_lock(self.folder)
            held = lock is not None and lock.is_held()
            if held is None:  # not to be known but by watching, with this machine's clock alone
                if watched is None and (left := self._standing(lock, 0.0)) > 0:
                    self._say(f"waiting    for the run folder: looking for {left:.0f} s whether {lock.owner} is alive")
                if watched is None or lock.number != watched.number or (lock != watched and self._was_this_job(lock)):
                    watched, since = lock, time.monotonic()
                held = lock.touched_ns != watched.touched_ns
                if not held and self._standing(lock, time.monotonic() - since) > 0:
                    time.sleep(self.renew_seconds / 10)
                    continue
            if held:
                raise Held(lock.owner)
            if self._create(lock.number + 1 if lock is not None else 1):
                return self.number

    def _was_this_job(self, lock: "_Lock") -> bool:
        """Whether an earlier start of this Slurm job holds it: on a node that Slurm gave up it may go on for a while, and is waited for."""
        return lock.holder is not None and lock.holder.job is not None and lock.holder.job == self._holder.job

    def _standing(self, lock: "_Lock", watched_seconds: float) -> float:
        """Seconds for which an untouched lock of another machine still stands."""
        long_dead = time.time() - lock.touched_ns / 1e9 > _LONG_DEAD_SECONDS
        return 0.0 if long_dead else self.stale_seconds - watched_seconds

    def _create(self, number: int) -> bool:
        """Make the lock of this number; False if another was faster."""
        self.number = number
        try:
            self._write(os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        if self._lost_to() is not None:  # this number had been taken, given back and removed while this process looked
            _path(self.folder, number).unlink(missing_ok=True)
            return False
        for lower in _numbers(self.folder):
            if lower < number:
                _path(self.folder, lower).unlink(missing_ok=True)
        return True

    def _renew(self) -> None:
        while not self._over.wait(self.renew_seconds):
            try:
                if (other := self._lost_to()) is not None:
                    self._lost(f"run_dir={self.folder}: it was taken over by {other}, while this process showed no sign of life")
                    return
                os.utime(_path(self.folder, self.number))
            except FileNotFoundError:  # removed by a person
                with contextlib.suppress(OSError):
                    self._write(os.O_CREAT | os.O_EXCL)
            except OSError:
                pass  # the file system is away for the moment

    def _lost_to(self) -> str | None:
        """Who has taken the folder over, if someone has."""
        newest = _newest_lock(self.folder)
        return None if newest is None or newest.number <= self.number else newest.owner

    def _write(self, flags: int, released: bool = False) -> None:
        content = json.dumps({**asdict(self._holder), "released": released})
        with open(os.open(_path(self.folder, self.number), os.O_WRONLY | flags, 0o666), "w") as file:
            file.write(content + "\n")


@dataclass(frozen=True)
class _Lock:
    number: int
    touched_ns: int
    """By whichever clock the file system takes."""
    holder: Holder | None = None
    """None: it is being written just now, or its writer died meanwhile."""
    released: bool = False

    @property
    def owner(self) -> str:
        return str(self.holder or "another process")

    def is_held(self) -> bool | None:
        """None: this machine cannot tell."""
        if self.released:
            return False
        return self.holder.is_alive() if self.holder is not None else None


def _path(folder: Path, number: int) -> Path:
    return folder / f".lock.{number}"


def _numbers(folder: Path) -> list[int]:
    return [int(path.name[6:]) for path in folder.glob(".lock.*") if path.name[6:].isdigit()]


def _newest_lock(folder: Path) -> _Lock | None:
    while numbers := _numbers(folder):
        number = max(numbers)
        try:
            with open(_path(folder, number)) as file:  # opening asks a file server anew, where a name alone may come from a cache
                touched_ns, content = os.fstat(file.fileno()).st_mtime_ns, file.read()
        except FileNotFoundError:
            continue  # it has a successor by now
        try:
            facts = json.loads(content)
            return _Lock(number, touched_ns, Holder(**{key: facts[key] for key in Holder.__annotations__}), facts["released"])
        except (ValueError, KeyError, TypeError):
            return _Lock(number, touched_ns)
    return None


def _machine() -> str | None:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """None: there is no such process, or it is dead and only waits for its parent to notice."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
