"""Says what each rank does, and ends a run that hangs, so that whoever started it can start it again.

The loop marks its phases on a `Watch`. Two threads read it: one writes the heartbeat (heartbeat.py), one looks for a main thread that has
been in the same phase, or at the same micro-batch, for longer than the settings allow. Then all ranks write their stacks, the first to
notice says who keeps the others waiting, and all processes end with HANG_EXIT_CODE. Neither thread makes the main thread wait.

Not taken for a hang: a process that itself stood still (Ctrl-Z, a suspended job, a sleeping laptop), that computes on a CPU, or that a
debugger has stopped.
"""

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from hybrid_megatron import platform
from hybrid_megatron.config.schema import RunConfig, WatchdogConfig
from hybrid_megatron.errors import UserError
from hybrid_megatron.parallel.state import global_rank, world_size
from hybrid_megatron.training.heartbeat import PERIOD_SECONDS, Heartbeat, describe, folder_of, read_heartbeats, write_heartbeat
from hybrid_megatron.training.run_folder import append_event

HANG_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: a failure that trying again may mend."""

_TICK_SECONDS = 1.0
_REPORT_SECONDS = 2 * PERIOD_SECONDS + 2
"""Until each rank has heard of a hang and written its stacks."""
_LAST_RESORT_SECONDS = 60.0
"""Within which a hanging process has ended, even if nothing can be written any more."""
_FAILING_SECONDS = 60.0
"""For an exception on its way out, through process groups that other ranks may still be waiting in."""
_GROUPS_LATER_SECONDS = 120.0
"""torch's own timeout of an operation names no culprit, so it comes later than this watchdog's."""


@dataclass(frozen=True)
class _Place:
    """What the main thread does."""

    phase: str
    step: int
    micro_batch: int
    since: float
    """By time.time()."""


class Watch:
    """The place of the main thread. By itself nobody looks at it; see `watching`."""

    def __init__(self):
        self.place = _Place("starting", 0, 0, time.time())
        self.warm = False
        """Whether a step was done since the process started, so that kernels are compiled and tuned."""
        self.error: BaseException | None = None
        self.holding: int | None = None
        """`RunFolder.holding`, once the run folder is this run's."""

    def phase(self, name: str, step: int | None = None) -> None:
        """From here on the main thread is in this phase (heartbeat.py), `step` steps being done."""
        self.place = _Place(name, self.place.step if step is None else step, 0, time.time())

    def micro_batches(self, batches: Iterator) -> Iterator:
        """The same; waiting for the next is the phase data, what is done with it forward_backward."""
        count = 0
        self._at("data", count)
        for batch in batches:
            count += 1
            self._at("forward_backward", count)
            yield batch
            self._at("data", count)
        self._at("forward_backward", count)

    def _at(self, name: str, micro_batch: int) -> None:
        self.place = _Place(name, self.place.step, micro_batch, time.time())

    def failing(self, error: BaseException) -> None:
        """This exception is on its way out of the run; a UserError leaves all ranks together, others may leave some waiting."""
        self.phase("ending")
        self.error = None if isinstance(error, UserError) else error

    def begin_heartbeat(self, holding: int) -> None:
        """From here on the run folder is this run's."""
        self.holding = holding


UNWATCHED = Watch()
"""For steps outside of a run."""


def group_timeout(settings: WatchdogConfig, warm: bool) -> timedelta:
    """How long an operation between ranks may wait: a little longer than a rank may keep the others waiting."""
    if settings.step_seconds is None:
        return timedelta(days=7)
    longest = max(settings.step_seconds, settings.validation_seconds, settings.saving_seconds, 0 if warm else settings.first_step_seconds)
    return timedelta(seconds=longest + _GROUPS_LATER_SECONDS)


@contextlib.contextmanager
def watching(config: RunConfig) -> Iterator[Watch]:
    """A watch that is looked at, on every rank. Heartbeats are written from `begin_heartbeat` on."""
    watch = Watch()
    threads = [_Beat(config, watch)]
    if config.watchdog.step_seconds is not None:
        threads.append(_Guard(config, watch))
    for thread in threads:
        thread.start()
    try:
        yield watch
    finally:
        for thread in reversed(threads):
            thread.over.set()
            thread.join(PERIOD_SECONDS)  # not for ever: its file system may be away
        faulthandler.cancel_dump_traceback_later()


class _Beat(threading.Thread):
    """Writes this rank's heartbeat, and hears from the others that one of them hangs."""

    def __init__(self, config: RunConfig, watch: Watch):
        super().__init__(name="heartbeat", daemon=True)
        self.run_dir, self.watch, self.over = Path(config.run_dir), watch, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.1 if self.watch.holding is None else PERIOD_SECONDS):
            self.write()
        self.watch.phase("ended")
        self.write()

    def write(self) -> None:
        if self.watch.holding is not None:
            with contextlib.suppress(OSError):  # the file system is full, or away for the moment
                write_heartbeat(self.run_dir, _heartbeat(self.watch.holding, self.watch.place))


def _heartbeat(holding: int, place: _Place) -> Heartbeat:
    return Heartbeat(
        rank=global_rank(),
        holding=holding,
        step=place.step,
        phase=place.phase,
        micro_batch=place.micro_batch,
        since=place.since,
        time=time.time(),
        host=socket.gethostname(),
        pid=os.getpid(),
    )


class _Guard(threading.Thread):
    """Looks for a hang of the main thread, and ends the process."""

    def __init__(self, config: RunConfig, watch: Watch):
        super().__init__(name="watchdog", daemon=True)
        self.run_dir, self.settings, self.watch, self.over = Path(config.run_dir), config.watchdog, watch, threading.Event()

    @property
    def told(self) -> Path:
        """Made by the first rank that notices a hang; it is filled when that rank has spoken."""
        return folder_of(self.run_dir) / f"hang_{self.watch.holding}"

    def run(self) -> None:
        seen, still, ticks, then, cpu = self.watch.place, 0.0, 0, time.monotonic(), time.process_time()
        while not self.over.wait(_TICK_SECONDS):
            now, cpu_now = time.monotonic(), time.process_time()
            passed, computed, then, cpu = now - then, cpu_now - cpu, now, cpu_now
            computes = not platform.is_cuda() and computed > 0.1 * passed  # waiting for a GPU may take a processor too
            if self.watch.place is not seen or computes:
                seen, still = self.watch.place, 0.0
            else:
                still += min(passed, 2 * _TICK_SECONDS)  # what goes beyond is time in which this thread stood still itself
            limit, name = self.limit(seen.phase)
            if still > limit and _debugged():
                still = 0.0
            elif still > limit:
                self.end(f"no progress for {still:.0f} s ({name})")
            if ticks % 5 == 0:
                if self.watch.holding is not None and self.told.exists():
                    self.end("another rank saw no progress")
                # Only a main thread that keeps the interpreter to itself lets this come: this thread then cannot run either.
                faulthandler.dump_traceback_later(limit - still + 10, file=sys.__stderr__)
            ticks += 1

    def limit(self, phase: str) -> tuple[float, str]:
        """Seconds for which the main thread may stay where it is, and what says so."""
        settings = self.settings
        if self.watch.error is not None:
            return _FAILING_SECONDS, "after an exception"
        if phase in ("saving", "ending"):
            name = "saving_seconds"
        elif phase == "validation":
            name = "validation_seconds"
        else:
            name = "step_seconds" if self.watch.warm else "first_step_seconds"
        seconds = getattr(settings, name)
        return seconds, f"watchdog.{name}={seconds:g}"

    def end(self, why: str) -> None:
        """Write what is known and end the process, whatever still works."""
        threading.Thread(target=_end_anyway, daemon=True).start()
        try:
            self._tell(why)
        finally:
            os._exit(HANG_EXIT_CODE)

    def _tell(self, why: str) -> None:
        place = self.watch.place
        stacks = self._write_stacks(place)
        if self.watch.error is not None:
            traceback.print_exception(self.watch.error)
            _say(f"error      rank {global_rank()} cannot leave its process groups after this exception; it ends at once")
        elif self.watch.holding is None:
            _say(f"hang       rank {global_rank()} on {socket.gethostname()}: {why} in {place.phase}; it ends. Its stacks are in {stacks}")
        elif self._is_first():
            if world_size() > 1:
                time.sleep(_REPORT_SECONDS)
            with contextlib.suppress(OSError):
                write_heartbeat(self.run_dir, _heartbeat(self.watch.holding, place))
            places = describe(read_heartbeats(self.run_dir), world_size())
            then = "all ranks end, and the same command resumes from the newest checkpoint"
            _say("\n           ".join([f"hang       {why}; {then}", *places, f"stacks of all ranks: {stacks.parent}"]))
            append_event(self.run_dir, "hang", step=place.step, why=why, ranks=places)
            with contextlib.suppress(OSError):
                self.told.write_text("said\n")
        else:
            until = time.monotonic() + 2 * _REPORT_SECONDS
            while time.monotonic() < until and not self._was_said():
                time.sleep(0.2)

    def _write_stacks(self, place: _Place) -> Path:
        """Of all threads of this process, into the run folder, or where that fails among the process' messages."""
        path = self.run_dir / "logs/stacks" / f"rank_{global_rank():05d}_{place.step}.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "w") as file:
                file.write(
                    f"{place.phase} after step {place.step}, micro-batch {place.micro_batch}; {time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n"
                )
                file.flush()
                faulthandler.dump_traceback(file)
        except OSError:
            faulthandler.dump_traceback(sys.__stderr__)
        return path

    def _is_first(self) -> bool:
        try:
            self.told.parent.mkdir(parents=True, exist_ok=True)
            self.told.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return True
        return True

    def _was_said(self) -> bool:
        try:
            return bool(self.told.read_text())
        except OSError:
            return False


def _say(text: str) -> None:
    print(text, file=sys.__stderr__, flush=True)


def _end_anyway() -> None:
    time.sleep(_LAST_RESORT_SECONDS)
    os._exit(HANG_EXIT_CODE)


def _debugged() -> bool:
    """Whether someone looks into this process: the main thread is in a Python debugger, or another process is attached (Linux)."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None:
        if Path(frame.f_code.co_filename).name in ("pdb.py", "bdb.py", "pydevd.py"):
            return True
        frame = frame.f_back
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    return "TracerPid:\t0\n" not in status
