"""Killed or asked to stop at any moment, the same command again ends where an undisturbed run does."""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from hybrid_megatron.training.heartbeat import read_heartbeats
from tests.cpu.runs import Process, checkpoints, computed, snapshot, train
from tests.cpu.tiny import tiny_words

LEFTOVERS = (".partial", ".new")


@pytest.fixture(scope="module")
def undisturbed(ranks, tiny_data, tmp_path_factory) -> list[dict]:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train(ranks, 1, tiny_words(tiny_data, f"run_dir={run}")).code == 0
    return computed(run)


def check_finished(run: Path, undisturbed: list[dict]) -> None:
    assert computed(run) == undisturbed, "each step once, with bitwise the same losses"
    assert checkpoints(run)[-1] == "step_00000020"
    assert not [path for path in run.rglob("*") if path.name.endswith(LEFTOVERS)]


def lines_of(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.is_file() else 0


def saving(run: Path) -> bool:
    return any((run / "checkpoints").glob("step_*.partial"))


def test_killed_in_the_middle_of_a_save(tiny_data, tmp_path, undisturbed):
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "checkpoint.interval_steps=3", "checkpoint.keep_last=1")
    first = Process(words)
    first.wait_for(lambda: lines_of(run) >= 6 and saving(run))
    first.signal(signal.SIGKILL)
    assert first.end().code == -signal.SIGKILL
    ended = Process(words).end()
    assert ended.code == 0 and not ended.err
    done = int(re.search(r"resumed    step_(\d+)", ended.out)[1])
    assert done in (3, 6), "from the last checkpoint that was whole"
    check_finished(run, undisturbed)
    assert checkpoints(run) == ["step_00000020"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_again_and_again_at_random_moments(tiny_data, tmp_path, undisturbed, seed):
    chance = random.Random(seed)
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "checkpoint.interval_steps=2")
    for _ in range(4):
        process = Process(words)
        goal = lines_of(run) + chance.randint(0, 6)
        in_save = chance.random() < 0.5
        try:
            process.wait_for(lambda: lines_of(run) >= min(goal, 19) and (saving(run) or not in_save))
        except AssertionError:
            assert process.process.poll() == 0, "it finished before its moment came"
        process.signal(signal.SIGKILL)
        process.end()
    ended = Process(words).end()
    assert ended.code == 0 and not ended.err
    check_finished(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("sent, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_through_torchrun(tiny_data, tmp_path, ranks, sent, code):
    """Ctrl-C reaches torchrun and its workers, and torchrun passes it on to them: one wish to stop, not two."""
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "checkpoint.interval_steps=100")
    process = Process(words, processes=2)
    process.wait_for(lambda: lines_of(run) >= 3)
    process.signal_all(sent)
    ended = process.end()
    assert f"stopped    by {signal.Signals(sent).name} after step" in ended.out
    done = len(computed(run))
    assert 3 <= done < 20 and checkpoints(run) == [f"step_{done:08d}"]
    assert train(ranks, 2, words).code == 0
    assert len(computed(run)) == 20


def test_sigterm_to_a_process(tiny_data, tmp_path, undisturbed, ranks):
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "checkpoint.interval_steps=100")
    process = Process(words)
    process.wait_for(lambda: lines_of(run) >= 3)
    process.signal(signal.SIGTERM)
    time.sleep(0.02)
    process.signal(signal.SIGTERM)  # Slurm and torchrun send it each
    ended = process.end()
    assert ended.code == 143 and not ended.err
    done = len(computed(run))
    stopped = [line for line in ended.out.splitlines() if "SIGTERM" in line]
    assert stopped == [f"stopped    by SIGTERM after step {done}, with a checkpoint; run the same command again to resume"]
    assert checkpoints(run) == [f"step_{done:08d}"]
    assert train(ranks, 1, words).code == 0
    check_finished(run, undisturbed)


@pytest.mark.parametrize("name, code, size, rank", [("SIGINT", 130, 1, 0), ("SIGTERM", 143, 2, 1), ("SIGINT", 130, 2, 0)])
def test_signal_to_any_rank_stops_all_at_the_end_of_the_step(ranks, tiny_data, tmp_path, name, code, size, rank):
    run = tmp_path / "run"
    ended = train(ranks, size, tiny_words(tiny_data, f"run_dir={run}"), stop=(4, rank, name))
    assert ended.code == code and not ended.err
    assert f"stopped    by {name} after step 4, with a checkpoint" in ended.out
    assert len(computed(run)) == 4 and checkpoints(run) == ["step_00000004"]


def test_signal_in_the_last_step_completes_the_run(ranks, tiny_data, tmp_path):
    ended = train(ranks, 1, tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}", "train.tokens=1536"), stop=(3, 0, "SIGTERM"))
    assert ended.code == 0 and "complete   3 steps" in ended.out


@pytest.mark.parametrize("size", [1, 2])
def test_run_again_after_completion_changes_nothing(ranks, tiny_data, tmp_path, size):
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "train.tokens=1536")
    assert train(ranks, size, words).code == 0
    before = snapshot(run)
    ended = train(ranks, size, words)
    assert ended.code == 0 and "complete   this run has done all its 3 steps" in ended.out
    assert snapshot(run) == before


def test_lines_of_steps_after_the_checkpoint_are_written_anew(ranks, tiny_data, tmp_path, undisturbed):
    """A kill leaves metrics of steps that no checkpoint has, and perhaps half a line."""
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}")
    assert train(ranks, 1, words, stop=(7, 0, "SIGTERM")).code == 143
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "loss": 1.0}\n{"step": 9, "lo')
    (run / "checkpoints/step_00000009.partial").mkdir()
    (run / "checkpoints/step_00000009.partial/__0_0.distcp").write_bytes(b"half")
    assert train(ranks, 1, words).code == 0
    check_finished(run, undisturbed)


def test_leftover_of_a_killed_removal_is_removed(ranks, tiny_data, tmp_path):
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "train.tokens=1536", "checkpoint.interval_steps=1")
    assert train(ranks, 1, words, stop=(1, 0, "SIGTERM")).code == 143
    (run / "checkpoints/step_00000000.old.partial").mkdir()
    assert train(ranks, 1, words).code == 0
    assert checkpoints(run) == ["step_00000002", "step_00000003"], "the newest checkpoint.keep_last=2, nothing else"


@pytest.mark.slow
def test_torchrun_starts_all_ranks_again_after_one_was_killed(tiny_data, tmp_path, undisturbed):
    """Its restarts share one store: the ranks must not take each other's addresses from before."""
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "checkpoint.interval_steps=4")
    process = Process(["sleeps_once", *words], processes=2, module=("tests.cpu.disturbed",), restarts=1)

    def stuck() -> list[int]:
        return [beat.pid for beat in read_heartbeats(run) if (beat.rank, beat.step, beat.phase) == (1, 6, "data")]

    process.wait_for(lambda: bool(stuck()))
    os.kill(stuck()[0], signal.SIGKILL)
    ended = process.end()
    assert ended.code == 0 and "resumed    step_00000004" in ended.out, ended
    assert [line["step"] for line in computed(run)] == [line["step"] for line in undisturbed]
    assert max(abs(line["loss"] - other["loss"]) for line, other in zip(computed(run), undisturbed)) <= 1e-5, "two ranks, and one"
