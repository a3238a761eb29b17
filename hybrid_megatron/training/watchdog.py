"""Says what each rank does, and ends a run that hangs or fails on one rank, so that whoever started it can start it again.

The loop marks its phases on a `Watch`. Two threads read it: one writes the heartbeat (heartbeat.py) and hears whether another rank has
given up; one looks for a main thread that has been in the same phase, or at the same micro-batch, for longer than the settings allow.
The first rank that hangs or raises an exception leaves a mark in the run folder and says what happened; the others write their stacks and
end with it, even those that wait for it in an operation that no longer ends.
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

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from hybrid_megatron.config.schema import RunConfig, WatchdogConfig
from hybrid_megatron.errors import UserError
from hybrid_megatron.parallel.state import global_rank, world_size
from hybrid_megatron.training.heartbeat import PERIOD_SECONDS, Heartbeat, describe, folder_of, read_heartbeats, write_heartbeat
from hybrid_megatron.training.run_folder import append_event

_TICK_SECONDS = 1.0
_REPORT_SECONDS = 2 * PERIOD_SECONDS + 2
"""Until each rank has heard that one gives up, and has written its stacks."""
_LAST_RESORT_SECONDS = 60
"""Within which a process that gives up has ended, even if nothing can be written any more."""
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

    def __str__(self) -> str:
        return f"{self.phase} after step {self.step}" + (f", micro-batch {self.micro_batch}" if self.micro_batch else "")


class Watch:
    """The place of the main thread, and whether the run has been given up. By itself nobody looks at it; see `watching`."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.place = _Place("starting", 0, 0, time.time())
        self.warm = False
        """Whether a step was done since the process started, so that kernels are compiled and tuned."""
        self.holding: int | None = None
        """`RunFolder.holding`, once the run folder is this run's: from then on heartbeats are written."""
        self.given_up = False
        """Whether a rank has left its mark."""

    def phase(self, name: str, step: int | None = None) -> None:
        """From here on the main thread is in this phase (heartbeat.py), `step` steps being done."""
        self.place = _Place(name, self.place.step if step is None else step, 0, time.time())

    def micro_batches(self, batches: Iterator, waiting: str = "data", computing: str = "forward_backward") -> Iterator:
        """The same; waiting for the next is one phase, what is done with it another."""
        count, step = 0, self.place.step
        self.place = _Place(waiting, step, count, time.time())
        for batch in batches:
            count += 1
            self.place = _Place(computing, step, count, time.time())
            yield batch
            self.place = _Place(waiting, step, count, time.time())
        self.place = _Place(computing, step, count, time.time())

    @contextlib.contextmanager
    def failures_told(self) -> Iterator[None]:
        """An exception inside is recorded. Of several ranks, the first to fail shows it, and SystemExit takes its place on all.

        A UserError is not meant: all ranks have it, and `exit_with_code_2` shows it.
        """
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            first = self.give_up()
            where = f"rank {global_rank()} on {socket.gethostname()}, {self.place}"
            self.phase("ending")
            if first:
                append_event(self.run_dir, "failed", error=traceback.format_exception_only(error)[-1].strip(), where=where)
            if world_size() == 1:
                raise
            if first:
                print(f"failed     {where}; all ranks end\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                with contextlib.suppress(OSError):
                    get_error_handler().record_exception(error)  # torchrun's own report names the rank that recorded first
            raise SystemExit(1) from None

    def give_up(self) -> bool:
        """Tell all ranks that this run ends. Whether this rank is the first to say so."""
        self.given_up = True
        try:
            self.mark.parent.mkdir(parents=True, exist_ok=True)
            self.mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return True
        return True

    @property
    def mark(self) -> Path:
        return folder_of(self.run_dir) / f"given_up_{self.holding}"


UNWATCHED = Watch(Path())
"""For steps outside of a run."""


def group_timeout(settings: WatchdogConfig, warm: bool) -> timedelta:
    """How long an operation between ranks may wait: a little longer than a rank may keep the others waiting."""
    if settings.step_seconds is None:
        return timedelta(days=7)
    return timedelta(seconds=(settings.step_seconds if warm else settings.first_step_seconds) + _GROUPS_LATER_SECONDS)


@contextlib.contextmanager
def watching(config: RunConfig) -> Iterator[Watch]:
    """A watch that is looked at, on every rank."""
    watch = Watch(Path(config.run_dir))
    threads = [_Beat(watch)]
    if config.watchdog.step_seconds is not None:
        threads.append(_Guard(watch, config.watchdog))
    for thread in threads:
        thread.start()
    try:
        yield watch
    finally:
        for thread in reversed(threads):
            thread.over.set()
            thread.join(PERIOD_SECONDS)  # not for ever: its file system may be away


class _Beat(threading.Thread):
    """Writes this rank's heartbeat, and looks for another's mark."""

    def __init__(self, watch: Watch):
        super().__init__(name="heartbeat", daemon=True)
        self.watch, self.over = watch, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.1 if self.watch.holding is None else PERIOD_SECONDS):
            self.beat()
        self.watch.phase("ended")
        self.beat()

    def beat(self) -> None:
        if self.watch.holding is not None:
            with contextlib.suppress(OSError):  # the file system is full, or away for the moment
                _write_heartbeat(self.watch)
                self.watch.given_up = self.watch.given_up or self.watch.mark.exists()


class _Guard(threading.Thread):
    """Looks for a hang of the main thread, and ends the process then or when the run has been given up."""

    def __init__(self, watch: Watch, settings: WatchdogConfig):
        super().__init__(name="watchdog", daemon=True)
        self.watch, self.settings, self.over = watch, settings, threading.Event()

    def run(self) -> None:
        seen, still, then = self.watch.place, 0.0, time.monotonic()
        while not self.over.wait(_TICK_SECONDS):
            now = time.monotonic()
            passed, then = now - then, now
            if self.watch.place is not seen:
                seen, still = self.watch.place, 0.0
            else:
                still += min(passed, 2 * _TICK_SECONDS)  # beyond that this process itself was stopped: Ctrl-Z, a suspended job
            name = "step_seconds" if self.watch.warm else "first_step_seconds"
            limit = getattr(self.settings, name)
            if self.watch.given_up or still > limit:
                self.end(f"no progress for {still:.0f} s (watchdog.{name}={limit:g})" if still > limit else None)
                break
            # Comes only if the main thread keeps the interpreter to itself: this thread then cannot run either.
            faulthandler.dump_traceback_later(limit - still + 10, file=sys.__stderr__)
        faulthandler.cancel_dump_traceback_later()

    def end(self, why: str | None) -> None:
        """Write the stacks and end the process; the first rank to do so says `why`. None: another has given up.

        Returns only if the main thread has found its own way out.
        """
        faulthandler.dump_traceback_later(_LAST_RESORT_SECONDS, exit=True, file=sys.__stderr__)
        watch, place = self.watch, self.watch.place
        stacks = _write_stacks(watch.run_dir, place)
        if why is not None and watch.holding is None:
            _say(f"hang       rank {global_rank()} on {socket.gethostname()}, {place}: {why}; it ends. Its stacks are in {stacks}")
        elif why is not None and watch.give_up():
            _tell_hang(watch, why, stacks.parent)
        elif self.over.wait(_REPORT_SECONDS + PERIOD_SECONDS):  # torchrun and srun end all with the first; who speaks must come before
            return
        os._exit(1)


def _tell_hang(watch: Watch, why: str, stacks: Path) -> None:
    if world_size() > 1:
        time.sleep(_REPORT_SECONDS)
    with contextlib.suppress(OSError):
        _write_heartbeat(watch)
    places = describe(read_heartbeats(watch.run_dir), world_size())
    said = f"hang       {why}; all ranks end, and the same command resumes from the newest checkpoint"
    _say("\n           ".join([said, *places, f"stacks of all ranks: {stacks}"]))
    append_event(watch.run_dir, "hang", step=watch.place.step, why=why, ranks=places)


def _write_stacks(run_dir: Path, place: _Place) -> Path:
    """Of all threads of this process, into the run folder, or where that fails among the process' messages."""
    path = run_dir / "logs/stacks" / f"rank_{global_rank():05d}_step_{place.step:08d}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w") as file:
            file.write(f"{place}, {time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n")
            file.flush()
            faulthandler.dump_traceback(file)
    except OSError:
        faulthandler.dump_traceback(sys.__stderr__)
    return path


def _write_heartbeat(watch: Watch) -> None:
    place = watch.place
    write_heartbeat(
        watch.run_dir,
        Heartbeat(
            rank=global_rank(),
            step=place.step,
            phase=place.phase,
            micro_batch=place.micro_batch,
            since=place.since,
            time=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
        ),
    )


def _say(text: str) -> None:
    print(text, file=sys.__stderr__, flush=True)
