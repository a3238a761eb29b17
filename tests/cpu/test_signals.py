"""Signals ask a run to stop: any of them, on any rank, however often, and from the first moment on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_megatron.training.outcome import VARIABLE
from tests.cpu.runs import CHECKOUT, Ended, Process, checkpoints, command, computed, train
from tests.cpu.tiny import tiny_words


def in_python(code: str, *, ignoring: bool = False) -> subprocess.CompletedProcess:
    """A program that may send itself signals; `ignoring`: started as a batch script starts it that ignores them."""

    def ignore():
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        preexec_fn=ignore if ignoring else None,
        capture_output=True,
        text=True,
    )


STOPS = """
import signal, sys, time
from hybrid_megatron.training.signals import stop_on_signals
assert "torch" not in sys.modules and "omegaconf" not in sys.modules, "handlers must be there before anything heavy"
now = 0.0
time.monotonic = lambda: now
with stop_on_signals() as stop:
    for second, name in {arrivals}:
        now = second
        signal.raise_signal(signal.Signals[name])
    print(signal.Signals(stop.number).name)
"""


@pytest.mark.parametrize("ignoring", [False, True])
@pytest.mark.parametrize(
    "arrivals, first",
    [
        ([(0, "SIGUSR1"), (5, "SIGUSR1"), (60, "SIGTERM"), (90, "SIGTERM"), (120, "SIGTERM")], "SIGUSR1"),
        ([(0, "SIGTERM"), (0.1, "SIGTERM"), (5, "SIGTERM")], "SIGTERM"),
        ([(0, "SIGINT"), (0.1, "SIGINT"), (2.9, "SIGINT")], "SIGINT"),
        ([(0, "SIGTERM"), (60, "SIGINT"), (61, "SIGINT")], "SIGTERM"),
    ],
)
def test_what_arrives_again_hurries_nothing(arrivals, first, ignoring):
    ended = in_python(STOPS.format(arrivals=arrivals), ignoring=ignoring)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{first}\n", "")


def test_second_ctrl_c_of_a_person_stops_at_once():
    ended = in_python(STOPS.format(arrivals=[(0, "SIGINT"), (3.1, "SIGINT")]))
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_in_a_job_nobody_presses_ctrl_c_again(monkeypatch, tmp_path):
    """node.sh passes SIGINT on every second until training has begun, which takes longer than a person waits."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "outcome"))
    ended = in_python(STOPS.format(arrivals=[(second, "SIGINT") for second in range(60)]))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "SIGINT\n", "")


def handles(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal by now."""
    [mask] = [line.split()[1] for line in open(f"/proc/{pid}/status") if line.startswith("SigCgt")]
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, code", [("SIGUSR1", 138), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("SIGTERM", 143), ("SIGINT", 130)))]
)
def test_signal_while_everything_is_imported(tiny_data, tmp_path, name, code):
    """Neither a traceback nor lost: it stops before its first step, and writes nothing into the run folder."""
    told = tmp_path / "outcome"
    process = Process(tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}"), outcome=told, ignoring=True)
    number = signal.Signals[name]
    process.wait_for(lambda: handles(process.process.pid, number))
    process.signal(number)
    ended = process.end()
    assert (ended.code, ended.err) == (code, "")
    assert ended.out == f"stopped    by {name} before its first step, nothing lost; run the same command again to begin\n"
    assert told.read_text() == f"stopped {name}\n"
    assert not (tmp_path / "run").exists()


def test_signal_while_a_run_is_built(ranks, tiny_data, tmp_path):
    """Resumed, it stops before the next step: its newest checkpoint has everything."""
    run, told = tmp_path / "run", tmp_path / "outcome"
    words = tiny_words(tiny_data, f"run_dir={run}")
    assert train(ranks, 2, words, stop=(3, 0, "SIGTERM")).code == 143
    ended = train(ranks, 2, words, stop=(0, 1, "SIGUSR1"), outcome=told)
    assert ended.code == 138 and told.read_text() == "stopped SIGUSR1\n"
    assert ended.out.splitlines()[-1] == (
        "stopped    by SIGUSR1 before the next step: 3 are done, as its newest checkpoint has them, nothing lost; "
        "run the same command again to resume"
    )
    assert checkpoints(run) == ["step_00000003"] and len(computed(run)) == 3


def test_terminated_again_and_again_while_it_saves(ranks, tiny_data, tmp_path):
    """Slurm and torchrun ask again while the checkpoint is being written, in the middle of any system call: it is written."""
    words, told = tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}"), tmp_path / "outcome"
    [(ended, sent)] = ranks.run(1, stormy_save, words, told)
    assert sent > 10
    assert (ended.code, ended.err) == (138, "") and told.read_text() == "stopped SIGUSR1\n"
    assert checkpoints(tmp_path / "run") == ["step_00000002"]
    assert train(ranks, 1, words).code == 0


def stormy_save(words: list[str], told: Path) -> tuple[Ended, int]:
    """Stopped in its second step, and signalled every millisecond from the beginning to the end of the save; with how many were sent."""
    import threading
    import unittest.mock

    from hybrid_megatron.training import loop

    plain, over, sent = loop._save, threading.Event(), []

    def storm():
        while not over.wait(0.001):
            os.kill(os.getpid(), signal.SIGTERM)
            sent.append(signal.SIGTERM)

    def save(*arguments, **more):
        thread = threading.Thread(target=storm)
        thread.start()
        try:
            return plain(*arguments, **more)
        finally:
            over.set()
            thread.join()

    with unittest.mock.patch.object(loop, "_save", save):
        return command(words, stop=(2, 0, "SIGUSR1"), outcome=told), len(sent)
