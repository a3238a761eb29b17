"""Who holds a run folder: never two runs in one, and a dead holder does not keep it.

Two means, since neither is enough:

.lock       held by flock. The kernel drops it when its holder dies, so the folder is free at once. But some file systems have no locks, and
            on some (Lustre with localflock, NFS with nolock) a lock is seen by its own node alone.
.lease.N    says who holds the folder and is touched every RENEW_SECONDS. Another takes the folder by creating .lease.N+1, which exactly one
            can (O_EXCL), once the lease was given back, its process is dead (seen on the same machine), or it has not been touched for
            STALE_SECONDS. A holder that finds a lease after its own has lost the folder and must stop.

No node's clock is trusted: a lease is watched by one's own, and how old it is already is read off the file server's, by touching a file.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

RENEW_SECONDS = 10.0
STALE_SECONDS = 120.0
"""Untouched for so long, a lease may be taken: a shared file system that fails over stands still for a minute or so."""
_LONG_DEAD_SECONDS = 3600.0
"""Beyond any difference of clocks: such a lease needs no watching."""
_ALIVE = float("inf")


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
    """Another holds the folder; `str` says who, as far as is known."""


def holder_of(run_dir: Path) -> Holder | None:
    """Who trains in this folder now. None: nobody, or a process of another machine without a sign of life for STALE_SECONDS."""
    lease = _newest_lease(Path(run_dir))
    if lease is None or lease.holder is None or lease.released:
        return None
    alive = lease.holder.is_alive()
    if alive is None:
        alive = _age(lease) < STALE_SECONDS
    return lease.holder if alive else None


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
        """Take the folder, if need be after waiting until a silent holder's lease is stale, which `say` says.

        Raises Held if its holder is alive or keeps its flock, OSError if nothing can be written there. `lost` is called, in a thread, with
        one sentence if another takes the folder over.
        """
        self.folder, self.renew_seconds, self.stale_seconds = folder, renew_seconds, stale_seconds
        self._say, self._lost, self._holder = say, lost, Holder.this_process()
        self._file = open(folder / ".lock", "a")
        try:
            self.number = self._acquire()
        except BaseException:
            self._file.close()
            raise
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="run folder lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._over.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            if self._lost_to() is None:
                self._write(os.O_CREAT | os.O_TRUNC, released=True)
        self._file.close()

    def _acquire(self) -> int:
        first, began, said = None, time.monotonic(), False
        while True:
            in_the_way = not self._flock()
            lease = _newest_lease(self.folder)
            if (lease and lease.number) != (first and first.number):
                first, began = lease, time.monotonic()
            waited = time.monotonic() - began
            left = self._stands_for(lease, first, waited)
            if in_the_way and lease is None:  # whoever has the flock is just about to say who it is
                left = 2 * self.renew_seconds - waited
            elif in_the_way:  # it lives, or the file server does not know yet that its node is dead: never taken, but waited for
                left = max(left, self.stale_seconds + 3 * self.renew_seconds - waited)
            elif left <= 0:
                number = 1 if lease is None else lease.number + 1
                if self._create(number):
                    return number
                continue
            if left == _ALIVE or left <= 0:
                raise Held("" if lease is None or lease.holder is None else str(lease.holder))
            if not said and waited > min(2.0, self.renew_seconds):
                said = True
                who = "another process" if lease is None or lease.holder is None else lease.holder
                self._say(f"waiting    for the run folder: {who} has it and shows no sign of life; for {left:.0f} s more at most")
            time.sleep(min(self.renew_seconds / 10, 0.5))

    def _stands_for(self, lease: "_Lease | None", first: "_Lease | None", waited: float) -> float:
        """Seconds for which the lease must still stand untouched before it may be taken; `first` is the same as it was seen first."""
        if lease is None or lease.released:
            return 0
        alive = lease.holder.is_alive() if lease.holder is not None else None
        if alive is not None:
            return _ALIVE if alive else 0
        if lease.touched != first.touched:
            return _ALIVE
        age = _age(lease)
        if age > _LONG_DEAD_SECONDS:
            return 0
        # The server's clock may be the holder's own (Lustre): an old lease is watched for a while too, and one of the future no longer.
        return max(self.stale_seconds - max(age, waited), 3 * self.renew_seconds - waited)

    def _flock(self) -> bool:
        """Whether no other process has the flock, as far as this file system has any."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR)
        return True

    def _create(self, number: int) -> bool:
        """Take the lease of this number; False if another was faster."""
        self.number = number
        try:
            self._write(os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        if self._lost_to() is not None:  # this number had been taken and given back while this process looked
            _lease_path(self.folder, number).unlink(missing_ok=True)
            return False
        for lower in _numbers(self.folder):
            if lower < number:
                _lease_path(self.folder, lower).unlink(missing_ok=True)
        return True

    def _renew(self) -> None:
        while not self._over.wait(self.renew_seconds):
            try:
                if (other := self._lost_to()) is not None:
                    self._lost(f"run_dir={self.folder}: it was taken over by {other}, while this process showed no sign of life")
                    return
                os.utime(_lease_path(self.folder, self.number))
            except FileNotFoundError:  # removed by a person
                with contextlib.suppress(OSError):
                    self._write(os.O_CREAT | os.O_EXCL)
            except OSError:
                pass  # the file system is away for the moment

    def _lost_to(self) -> Holder | str | None:
        """Who has taken the folder over, if someone has."""
        newest = _newest_lease(self.folder)
        return None if newest is None or newest.number <= self.number else newest.holder or "another process"

    def _write(self, flags: int, released: bool = False) -> None:
        content = json.dumps({**asdict(self._holder), "released": released})
        with open(os.open(_lease_path(self.folder, self.number), os.O_WRONLY | flags, 0o666), "w") as file:
            file.write(content + "\n")


@dataclass(frozen=True)
class _Lease:
    path: Path
    number: int
    holder: Holder | None
    """None: it is being written just now."""
    released: bool
    touched: int
    """In nanoseconds, by whichever clock the file system takes."""


def _lease_path(folder: Path, number: int) -> Path:
    return folder / f".lease.{number}"


def _numbers(folder: Path) -> list[int]:
    return [int(path.name[7:]) for path in folder.glob(".lease.*") if path.name[7:].isdigit()]


def _newest_lease(folder: Path) -> _Lease | None:
    while numbers := _numbers(folder):
        path = _lease_path(folder, max(numbers))
        try:
            with open(path) as file:  # opening asks the server anew, where a name alone may be answered from a cache
                touched, content = os.fstat(file.fileno()).st_mtime_ns, file.read()
        except FileNotFoundError:
            continue  # it has a successor by now
        try:
            facts = json.loads(content)
            return _Lease(path, max(numbers), Holder(**{key: facts[key] for key in Holder.__annotations__}), facts["released"], touched)
        except (ValueError, KeyError, TypeError):
            return _Lease(path, max(numbers), None, False, touched)
    return None


def _age(lease: _Lease) -> float:
    """Seconds since the lease was touched, by the file server's clock."""
    try:
        with tempfile.NamedTemporaryFile(dir=lease.path.parent, prefix=".clock.") as file:
            now = os.fstat(file.fileno()).st_mtime_ns
    except OSError:  # a folder that this user may only read
        now = time.time_ns()
    return (now - lease.touched) / 1e9


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
