"""A run folder has one holder: while it lives nobody else gets it, once it is dead the next one does."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hybrid_megatron import folder_lock
from hybrid_megatron.folder_lock import FolderLock, Held, holder_of

RENEW, STALE = 0.1, 1.0
LONG = 20.0
"""Before a lock is stale, where nothing is to be waited for, however busy the machine."""


def take(folder: Path, said: list | None = None, lost: list | None = None, stale: float = STALE) -> FolderLock:
    say, tell = ([] if said is None else said).append, ([] if lost is None else lost).append
    return FolderLock(folder, say=say, lost=tell, renew_seconds=RENEW, stale_seconds=stale)


def elsewhere(monkeypatch) -> None:
    """What is held from here on is held by a process of another machine, which this one cannot look for."""
    monkeypatch.setattr(folder_lock, "_machine", lambda: "another machine")


@pytest.fixture
def holder(tmp_path):
    """A process that holds the folder, in a Slurm job."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"SLURM_JOB_ID": "77", "PYTHONPATH": os.getcwd()},
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


HOLD = f"""
import sys, time
from pathlib import Path
from hybrid_megatron.folder_lock import FolderLock
assert "torch" not in sys.modules and "omegaconf" not in sys.modules, "commands that only look must not take seconds"
lock = FolderLock(Path(sys.argv[1]), say=print, lost=print, renew_seconds={RENEW}, stale_seconds={STALE})
print("held", flush=True)
time.sleep(1000)
"""


def test_a_living_holder_keeps_it_and_is_named(tmp_path, holder):
    began = time.monotonic()
    with pytest.raises(Held) as refused:
        take(tmp_path, stale=LONG)
    assert time.monotonic() - began < LONG / 2, "at once"
    assert str(refused.value).startswith(f"process {holder.pid} on {os.uname().nodename}, Slurm job 77, since 20")
    found = holder_of(tmp_path)
    assert (found.pid, found.host, found.job) == (holder.pid, os.uname().nodename, "77") and found.is_alive()


def test_killed_holder_is_succeeded_at_once(tmp_path, holder):
    holder.kill()
    while holder_of(tmp_path) is not None:  # dying takes its time
        time.sleep(0.01)
    began = time.monotonic()
    take(tmp_path, stale=LONG).release()
    assert time.monotonic() - began < LONG / 2
    assert [path.name for path in tmp_path.glob(".lock.*")] == [".lock.2"]


def test_stopped_holder_keeps_it(tmp_path, holder):
    """It may go on at any moment."""
    holder.send_signal(signal.SIGSTOP)
    time.sleep(1.2 * STALE)
    with pytest.raises(Held):
        take(tmp_path)
    assert holder_of(tmp_path).pid == holder.pid


def test_released(tmp_path):
    for number in range(1, 4):
        lock = take(tmp_path)
        assert holder_of(tmp_path).pid == os.getpid() and lock.number == number
        lock.release()
        assert holder_of(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == [".lock.3"]


def test_nobody(tmp_path):
    assert holder_of(tmp_path) is None and holder_of(tmp_path / "missing") is None


def test_holder_on_another_machine_that_shows_life(tmp_path, monkeypatch):
    with monkeypatch.context() as there:
        elsewhere(there)
        lock = take(tmp_path)
    try:
        assert holder_of(tmp_path).is_alive() is None
        began = time.monotonic()
        with pytest.raises(Held):
            take(tmp_path, stale=LONG)
        assert time.monotonic() - began < LONG / 2, "seen alive before its lock could be stale"
    finally:
        lock.release()
    take(tmp_path).release()


def test_earlier_start_of_the_same_job_is_waited_for(tmp_path, monkeypatch):
    """Slurm gave its node up and started the job again, but the node still lives."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with monkeypatch.context() as there:
        elsewhere(there)
        lock = take(tmp_path)
    threading.Timer(2 * STALE, lock.release).start()
    began = time.monotonic()
    take(tmp_path, stale=LONG).release()
    assert 2 * STALE <= time.monotonic() - began < LONG


def dead_elsewhere(folder: Path, monkeypatch, seconds_ago: float) -> None:
    """A lease of another machine that was last touched so long ago."""
    with monkeypatch.context() as there:
        elsewhere(there)
        lock = take(folder)
    lock._over.set()
    lock._thread.join()
    touched = time.time() - seconds_ago
    os.utime(folder / f".lock.{lock.number}", (touched, touched))


@pytest.mark.parametrize(
    "seconds_ago, least, stale",
    [
        (0, STALE, STALE),
        (500, STALE, STALE),  # perhaps by a clock that is wrong
        (-500, STALE, STALE),
        (4000, 0, LONG),  # no clock is so wrong
    ],
)
def test_dead_holder_on_another_machine(tmp_path, monkeypatch, seconds_ago, least, stale):
    """It is watched until it is known to be dead."""
    dead_elsewhere(tmp_path, monkeypatch, seconds_ago)
    began = time.monotonic()
    take(tmp_path, stale=stale).release()
    assert least <= time.monotonic() - began <= LONG / 2


def test_waiting_is_said(tmp_path, monkeypatch):
    dead_elsewhere(tmp_path, monkeypatch, 0)
    said = []
    take(tmp_path, said).release()
    [line] = said
    assert line.startswith(f"waiting    for the run folder: looking for 1 s whether process {os.getpid()} on ") and line.endswith(
        "is alive"
    )


def test_holder_of_another_machine_counts_as_long_as_it_may_live(tmp_path, monkeypatch):
    dead_elsewhere(tmp_path, monkeypatch, folder_lock.STALE_SECONDS - 5)
    assert holder_of(tmp_path) is not None
    os.utime(tmp_path / ".lock.1", (0, 0))
    assert holder_of(tmp_path) is None


def test_lost_to_another(tmp_path, monkeypatch):
    """It stood still for so long that another took the folder: it hears of it, and does not give back what is not its own."""
    lost = []
    lock = take(tmp_path, lost=lost)
    (tmp_path / ".lock.2").write_text((tmp_path / ".lock.1").read_text())
    until = time.monotonic() + 5
    while not lost and time.monotonic() < until:
        time.sleep(0.01)
    [sentence] = lost
    assert sentence.startswith(f"run_dir={tmp_path}: it was taken over by process {os.getpid()} on ")
    lock.release()
    assert holder_of(tmp_path) is not None, "the other's lease"


def test_lease_removed_by_a_person_is_made_again(tmp_path):
    lost = []
    lock = take(tmp_path, lost=lost)
    (tmp_path / ".lock.1").unlink()
    time.sleep(5 * RENEW)
    assert holder_of(tmp_path).pid == os.getpid() and not lost
    lock.release()


def test_half_written_lease_is_waited_for(tmp_path):
    """Its writer may be about to go on, or dead."""
    (tmp_path / ".lock.7").write_text('{"host": "no')
    began = time.monotonic()
    lock = take(tmp_path)
    assert time.monotonic() - began >= STALE - 0.1 and lock.number == 8
    lock.release()


RACERS = 4


def racer(folder: Path, rounds: int, barrier, won) -> None:
    """Takes part in a race for each folder."""
    for number in range(rounds):
        place = folder / str(number)
        barrier.wait()
        try:
            lock = take(place, stale=LONG)
        except Held:
            lock = None
        else:
            won[number] += 1
        barrier.wait()  # nobody gives back before all have tried
        if lock is not None:
            lock.release()


@pytest.mark.parametrize("rounds", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_of_several_takers_one_wins(tmp_path, monkeypatch, rounds):
    """Of folders that are new, were given back, or have a dead holder."""
    for number in range(rounds):
        (tmp_path / str(number)).mkdir()
        if number % 3 == 1:
            take(tmp_path / str(number)).release()
        elif number % 3 == 2:
            dead_elsewhere(tmp_path / str(number), monkeypatch, 5000)
    context = multiprocessing.get_context("spawn")
    barrier, won = context.Barrier(RACERS), context.Array("i", rounds)
    racers = [context.Process(target=racer, args=(tmp_path, rounds, barrier, won)) for _ in range(RACERS)]
    for process in racers:
        process.start()
    for process in racers:
        process.join()
    assert list(won) == [1] * rounds


@pytest.mark.parametrize("times", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_takers_that_give_back_at_once_never_overlap(tmp_path, times):
    """Many takings in a row, so that a taker may look at a lease that has several successors when it acts."""
    context = multiprocessing.get_context("spawn")
    inside, overlaps = context.Value("i", 0), context.Value("i", 0)
    takers = [context.Process(target=take_often, args=(tmp_path, times, inside, overlaps)) for _ in range(RACERS)]
    for process in takers:
        process.start()
    for process in takers:
        process.join()
    assert [process.exitcode for process in takers] == [0] * RACERS and overlaps.value == 0


def take_often(folder: Path, times: int, inside, overlaps) -> None:
    taken = 0
    while taken < times:
        try:
            lock = take(folder, stale=LONG)
        except Held:
            continue
        taken += 1
        with inside.get_lock():
            inside.value += 1
            overlaps.value += inside.value > 1
        time.sleep(0.001)
        with inside.get_lock():
            inside.value -= 1
        lock.release()
