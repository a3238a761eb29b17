"""Checkpoints are written beside training, one at a time, and stay as long as they should."""

import json
import signal
from pathlib import Path

import pytest

from hybrid_megatron.checkpoint.store import CheckpointStore, form_of, read_progress
from hybrid_megatron.training.loop import _due
from tests.cpu import checkpoint_cells as cells
from tests.cpu.cells import run_folder_metrics
from tests.cpu.runs import Process, checkpoints, computed, train
from tests.cpu.tiny import tiny_config, tiny_words


def events(run: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == kind]


def test_what_is_due(tiny_data):
    """By step and signal: the last step and Ctrl-C permanent, where time is short rolling."""
    config = tiny_config(tiny_data, "run_dir=unused", "checkpoint.interval_steps=3", "checkpoint.permanent_interval_steps=6")
    assert [_due(config, step, 0) for step in range(1, 8)] == [None, None, "rolling", None, None, "permanent", None]
    assert _due(config, 20, 0) == _due(config, 20, signal.SIGTERM) == "permanent"
    for step in (1, 6):
        assert _due(config, step, signal.SIGINT) == "permanent"
        assert _due(config, step, signal.SIGTERM) == _due(config, step, signal.SIGUSR1) == "rolling"


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_retention_keeps_permanent_ones_and_the_newest(ranks, tiny_data, tmp_path, size):
    run = tmp_path / "run"
    words = tiny_words(
        tiny_data, f"run_dir={run}", "train.tokens=6144", "checkpoint.interval_steps=2", "checkpoint.permanent_interval_steps=6"
    )
    assert train(ranks, size, words).code == 0
    assert checkpoints(run) == ["step_00000006", "step_00000010", "step_00000012"]
    store = CheckpointStore(run)
    assert [form_of(path) for path in store.complete()] == ["permanent", "rolling", "permanent"]
    saved = events(run, "saved")
    assert [(event["step"], event["form"]) for event in saved] == [
        (2, "rolling"), (4, "rolling"), (6, "permanent"), (8, "rolling"), (10, "rolling"), (12, "permanent"),
    ]  # fmt: skip
    assert all(0 < event["stall_seconds"] <= event["seconds"] for event in saved)
    assert all(event["checkpoint"] == f"step_{event['step']:08d}" for event in saved)
    stalled = [
        line["step"] for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "checkpoint_stall_seconds" in line
    ]
    assert stalled[0] == 3 and len(stalled) >= 5, "in the line of the step after"
    progress = read_progress(store.newest())
    assert (progress.step, progress.tokens, progress.layout["data"]) == (12, 6144, size)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_save_slower_than_the_interval_is_waited_for(ranks, tiny_data, tmp_path, size):
    """Never two at once, and it is said."""
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "train.tokens=2048", "checkpoint.interval_steps=1", "checkpoint.keep_last=9")
    ended = ranks.run(size, cells.train_with_held_writers, words, {})
    assert {each.code for each in ended} == {0}
    assert checkpoints(run) == [f"step_{step:08d}" for step in range(1, 5)]
    [said] = ended[0].err.splitlines()
    assert said.startswith(f"warning: {run}/checkpoints/step_00000001: still being written when step 2 was to be saved")
    late = events(run, "save_late")
    assert [(event["checkpoint"], event["step"]) for event in late] == [(f"step_{step:08d}", step + 1) for step in (1, 2)], (
        "the last is waited for anyway"
    )
    saved = events(run, "saved")
    assert all(event["waited_seconds"] < before["stall_seconds"] < before["seconds"] for event, before in zip(late, saved))


def test_training_does_not_wait_for_the_disk(ranks, tiny_data, tmp_path):
    """A file that is not written for three steps: they go on, and a run that stops waits for it; without `asynchronous` all of a save is
    waited for at once."""
    words = tiny_words(tiny_data, "checkpoint.interval_steps=5", "validation.interval_steps=100")
    for asynchronous in ("true", "false"):
        run = tmp_path / asynchronous
        more = [f"run_dir={run}", f"checkpoint.asynchronous={asynchronous}"]
        [ended] = ranks.run(1, cells.train_with_held_writers, [*words, *more], {"stop": (8, 0, "SIGTERM")})
        assert ended.code == 143 and not ended.err and checkpoints(run) == ["step_00000005", "step_00000008"]
        first, last = events(run, "saved")
        assert (first["step"], last["step"]) == (5, 8) and not events(run, "save_late")
        between = sum(line["step_seconds"] for line in run_folder_metrics(run)[5:8])
        assert (first["seconds"] - first["stall_seconds"] > 0.99 * between) == (asynchronous == "true")
        assert last["stall_seconds"] > 0.8 * last["seconds"]


@pytest.mark.slow
def test_killed_while_it_trains_and_writes(ranks, tiny_data, tmp_path):
    """kill -9 two steps after a save began: the half-written one is left over, is not taken for whole, and goes."""
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    words = tiny_words(tiny_data, "train.tokens=5120", "checkpoint.interval_steps=3")
    assert train(ranks, 1, [*words, f"run_dir={undisturbed}"]).code == 0
    process = Process([*words, f"run_dir={run}"], module=("tests.cpu.slow_train", "30"))
    metrics = run / "metrics.jsonl"
    process.wait_for(lambda: metrics.is_file() and metrics.read_text().count("\n") >= 5)
    assert checkpoints(run) == ["step_00000003.partial"]
    process.signal(signal.SIGKILL)
    assert process.end().code == -signal.SIGKILL
    assert checkpoints(run) == ["step_00000003.partial"]
    assert train(ranks, 1, [*words, f"run_dir={run}"]).code == 0
    assert computed(run) == computed(undisturbed) and checkpoints(run) == checkpoints(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("size, rank", [pytest.param(1, None, marks=pytest.mark.slow), (2, 1)])
def test_a_writer_that_fails_ends_the_run(ranks, tiny_data, tmp_path, size, rank):
    """Beside training, on one rank or all: found a step or so later, in one sentence; older checkpoints stay, nothing is left over."""
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "checkpoint.interval_steps=6")
    assert train(ranks, size, words, stop=(4, 0, "SIGTERM")).code == 143
    ended = train(ranks, size, words, file_limit=20_000, file_limit_rank=rank)
    assert ended.code == 2
    [said] = ended.errors
    assert "step_00000006: not saved, File too large; the newest complete checkpoint is step_00000004" in said
    assert checkpoints(run) == ["step_00000004"] and 6 <= len((run / "metrics.jsonl").read_text().splitlines()) <= 12
    assert train(ranks, size, words).code == 0, "with room again, the same command resumes"
    assert len(computed(run)) == 20


@pytest.mark.slow
def test_a_run_that_diverges_completes_its_checkpoint_first(ranks, tiny_data, tmp_path):
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "optimizer.peak_lr=1e30", "schedule.warmup_tokens=0", "checkpoint.interval_steps=1")
    [ended] = ranks.run(1, cells.train_with_held_writers, [*words, "validation.interval_steps=100"], {})
    assert ended.code == 2 and "the newest good checkpoint is step_00000001" in ended.errors[0]
    assert checkpoints(run) == ["diverged_00000001", "step_00000001"]


def test_a_run_that_diverges_in_its_first_step_keeps_its_parameters(ranks, tiny_data, tmp_path):
    """The optimizer has no moments yet: they are zero."""
    run = tmp_path / "run"
    ended = train(ranks, 1, tiny_words(tiny_data, f"run_dir={run}", "model.init_std=1e30"))
    assert ended.code == 2 and ended.errors[0].startswith("step 1: the gradient norm is nan")
    assert checkpoints(run) == ["diverged_00000000"]
