"""Ranks that die, fail or hang over NCCL, in processes of their own as torchrun starts them: each ends in a run that has all its steps."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from hybrid_megatron.training.heartbeat import read_heartbeats
from tests.cpu.runs import Process, computed
from tests.cpu.tiny import make_tiny_data, tiny_words
from tests.cpu.zoo import MATRIX

MODEL = [*MATRIX["attention rope + nope, HH"], "model.head_dim=16", "checkpoint.interval_steps=4"]
PROCESSES = min(torch.cuda.device_count(), 4)
LAST = PROCESSES - 1
LARGEST = 1e-5
"""Of the difference of two losses, in nats."""

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_tiny_data(tmp_path_factory.mktemp("failures"))


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory) -> list[dict]:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    ended = Process(words(data, run), processes=PROCESSES).end(200)
    assert ended.code == 0, ended
    return computed(run)


def words(data: Path, run: Path, *more: str) -> list[str]:
    return tiny_words(data, f"run_dir={run}", *MODEL, *more)


def check_whole(run: Path, undisturbed: list[dict]) -> None:
    lines = computed(run)
    assert len(lines) == len(undisturbed) == 20
    assert max(abs(line["loss"] - other["loss"]) for line, other in zip(lines, undisturbed)) <= LARGEST


def events(run: Path, kind: str) -> list[dict]:
    return [event for line in (run / "events.jsonl").read_text().splitlines() if (event := json.loads(line))["event"] == kind]


def test_killed_rank_is_restarted_by_torchrun(data, tmp_path, undisturbed):
    run = tmp_path / "run"
    process = Process(["sleeps_once", *words(data, run)], processes=PROCESSES, module=("tests.cpu.disturbed",), restarts=1)

    def stuck() -> bool:
        return any(beat.rank == LAST and (beat.step, beat.phase) == (6, "data") for beat in read_heartbeats(run))

    process.wait_for(stuck, 150)
    [pid] = [beat.pid for beat in read_heartbeats(run) if beat.rank == LAST]
    os.kill(pid, signal.SIGKILL)
    ended = process.end(200)
    assert ended.code == 0 and "resumed    step_00000004" in ended.out, ended
    assert len(events(run, "start")) + len(events(run, "resumed")) == 2
    check_whole(run, undisturbed)


def test_hanging_rank_is_named(data, tmp_path, undisturbed):
    run = tmp_path / "run"
    disturbed = Process(["sleeps", *words(data, run, "watchdog.step_seconds=10")], processes=PROCESSES, module=("tests.cpu.disturbed",))
    ended = disturbed.end(200)
    assert ended.code == 1
    [culprit] = [line for line in ended.err.splitlines() if "<- the others wait for it" in line]
    assert culprit.strip().startswith(f"rank {LAST} (") and "): data after step 6 since " in culprit
    assert len(list((run / "logs/stacks").iterdir())) == PROCESSES
    assert Process(words(data, run), processes=PROCESSES).end(200).code == 0
    check_whole(run, undisturbed)


def test_failing_rank_is_shown(data, tmp_path, undisturbed):
    run = tmp_path / "run"
    ended = Process(["raises", *words(data, run)], processes=PROCESSES, module=("tests.cpu.disturbed",)).end(200)
    assert ended.code == 1
    [head] = [line for line in ended.err.splitlines() if line.startswith("failed     ")]
    assert f"rank {LAST} on " in head and "data after step 6" in head
    assert "ZeroDivisionError: a mistake of ours" in ended.err
    assert Process(words(data, run), processes=PROCESSES).end(200).code == 0
    check_whole(run, undisturbed)
