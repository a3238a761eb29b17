"""A rank that hangs or fails ends all of them: with its name, where it was, and the stacks of all."""

import contextlib
import faulthandler
import io
import json
import os
import time
import unittest.mock
from datetime import timedelta
from pathlib import Path

import pytest

from hybrid_megatron.training.heartbeat import (
    SILENT_SECONDS, Heartbeat, culprits, describe, folder_of, read_heartbeats, remove_heartbeats, write_heartbeat,
)  # fmt: skip
from tests.cpu.runs import Ended, Process, command, computed, train
from tests.cpu.tiny import tiny_config, tiny_words


def beat(rank: int, phase: str = "forward_backward", step: int = 7, micro_batch: int = 0) -> Heartbeat:
    return Heartbeat(rank, step, phase, micro_batch, since=1e9, time=1e9 + 60, host=f"node{rank // 2}", pid=100 + rank)


@pytest.mark.parametrize(
    "phases, silent, blamed",
    [
        (["forward_backward", "data", "forward_backward", "forward_backward"], (), {1}),
        (["optimizer", "optimizer", "forward_backward", "forward_backward"], (), {2, 3}),
        (["logging", "saving", "saving", "saving"], (), {0}),
        (["optimizer"] * 4, (), set()),
        (["data", "forward_backward", "forward_backward", "forward_backward"], (2,), {2}),
        (["data", "forward_backward", "forward_backward"], (), {3}),  # no file of rank 3
    ],
)
def test_culprits(phases, silent, blamed):
    beats = {beat(rank, phase): SILENT_SECONDS + 1 if rank in silent else 2.0 for rank, phase in enumerate(phases)}
    assert culprits(beats, 4) == blamed


def test_a_rank_one_step_behind_is_the_culprit():
    assert culprits({beat(0, "data", step=8): 0.0, beat(1, "saving", step=7): 0.0}, 2) == {1}


def test_description():
    beats = {beat(0): 1.0, beat(1, "data", micro_batch=3): 0.0, beat(2): 2.0}
    since = time.strftime("%H:%M:%S", time.localtime(1e9))
    assert describe(beats, 3) == [
        f"rank 1 (node0, pid 101): data after step 7, micro-batch 3 since {since} <- the others wait for it",
        f"ranks 0, 2 (node0, node1): forward_backward after step 7 since {since}",
    ]
    [missing, silent, _] = describe({beat(0): 0.0, beat(1): 700.0}, 3)
    assert missing == "rank 2: no sign of life since the start <- the others wait for it"
    assert silent.endswith(", no sign of life for 700 s <- the others wait for it")
    assert describe({beat(0): 0.0, beat(1): 0.0}, 2)[-1].startswith("all ranks are in the same place")
    assert len(describe({beat(0): 0.0}, 1)) == 1


def test_heartbeats_are_read_back(tmp_path):
    assert read_heartbeats(tmp_path) == {}
    beats = [beat(0, micro_batch=12), beat(1, "data")]
    for each in [beat(0, "optimizer", step=123_456), *beats]:
        write_heartbeat(tmp_path, each)
    os.utime(folder_of(tmp_path) / "rank_00000.json", (0, 0))
    (folder_of(tmp_path) / "rank_00002.json").write_text('{"rank": 2, "st')
    found = read_heartbeats(tmp_path)
    assert list(found) == beats and found[beats[1]] == 0 and found[beats[0]] > 1e9
    remove_heartbeats(tmp_path)
    assert read_heartbeats(tmp_path) == {}


def test_what_a_run_leaves(ranks, tiny_data, tmp_path):
    """The last heartbeat of each rank, of the last start alone."""
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "train.tokens=2048")
    assert train(ranks, 2, words, stop=(2, 0, "SIGTERM")).code == 143
    assert [(each.rank, each.step, each.phase) for each in read_heartbeats(run)] == [(0, 2, "ended"), (1, 2, "ended")]
    assert train(ranks, 1, words).code == 0
    assert [(each.rank, each.step, each.phase) for each in read_heartbeats(run)] == [(0, 4, "ended")]


def test_places_of_a_run(ranks, tiny_data, tmp_path):
    words = tiny_words(tiny_data, f"run_dir={tmp_path}", "train.tokens=1536", "validation.interval_steps=1", "validation.samples=3")
    [places] = ranks.run(1, places_of, words)
    step = ["data 0", "data 0", *(f"{phase} {n}" for n in range(1, 4) for phase in ("forward_backward", "data")), "forward_backward 4"]
    after = ["optimizer 0", "validation 0", "validation 0", "validation 1", "validation 1", "validation 2", "logging 0"]
    assert places == ["starting 0", "loading 0", *3 * [*step, *after], "saving 0", "ending 0", "ended 0"]


def places_of(words: list[str]) -> list[str]:
    """Phases and micro-batches of the watch, in order."""
    from hybrid_megatron.training.watchdog import Watch

    places = []

    def set_place(watch, name, value):
        object.__setattr__(watch, name, value)
        if name == "place":
            places.append(f"{value.phase} {value.micro_batch}")

    with unittest.mock.patch.object(Watch, "__setattr__", set_place):
        assert command(words).code == 0
    return places


def test_hang(ranks, tiny_data, tmp_path):
    """Of two ranks one waits for ever for its data: both hear of it, write their stacks and end, and it is the one that is named."""
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "train.tokens=2048", "watchdog.step_seconds=3")
    ended = ranks.run(2, hanging, words, tmp_path)
    assert [codes for codes, _ in ended] == [[1], [1]]
    [said] = [said for _, said in ended if said]
    first, culprit, other, where = said.splitlines()
    assert first.startswith("hang       no progress for ") and "(watchdog.step_seconds=3); all ranks end" in first
    assert "rank 1 (" in culprit and "): data after step 2 since " in culprit and culprit.endswith(" <- the others wait for it")
    assert "rank 0 (" in other and "after step 2" in other and "wait for it" not in other
    stacks = sorted((run / "logs/stacks").iterdir())
    assert where.split() == ["stacks", "of", "all", "ranks:", str(stacks[0].parent)]
    assert [path.name for path in stacks] == ["rank_00000_step_00000002.txt", "rank_00001_step_00000002.txt"]
    assert stacks[1].read_text().startswith("data after step 2, ") and "in stuck_step" in stacks[1].read_text()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "hang"] == [2]


def hanging(words: list[str], folder: Path) -> tuple[list[int], str]:
    """Exit codes and words of this rank's watchdog, which here ends what hangs instead of the process, once both ranks' have."""
    from hybrid_megatron.data import BatchStream
    from hybrid_megatron.training import watchdog

    codes, said = [], io.StringIO()
    plain = BatchStream.step

    def stuck_step(stream, number):
        until = time.monotonic() + 60
        while number == 2 and os.environ["RANK"] == "1" and len(list(folder.glob("left_*"))) < 2:
            assert time.monotonic() < until
            time.sleep(0.05)
        yield from plain(stream, number)

    def leave(code):
        faulthandler.cancel_dump_traceback_later()
        codes.append(code)
        (folder / f"left_{os.environ['RANK']}").touch()
        raise SystemExit

    with (
        unittest.mock.patch.object(BatchStream, "step", stuck_step),
        unittest.mock.patch.object(os, "_exit", leave),
        unittest.mock.patch.multiple(watchdog, _REPORT_SECONDS=2.0, PERIOD_SECONDS=0.5, _TICK_SECONDS=0.2, _say=said.write),
    ):
        assert command(words).code == 0
    return codes, said.getvalue()


def test_exception_on_one_rank_ends_all_and_is_shown_once(ranks, tiny_data, tmp_path):
    """Not what the other says, which only lost its partner."""
    run = tmp_path / "run"
    first, second = ranks.run(2, failing, tiny_words(tiny_data, f"run_dir={run}"), run)
    assert (first.code, second.code, first.err) == (1, 1, "")
    head, trace, *_, last = second.err.strip().splitlines()
    assert head.startswith("failed     rank 1 on ") and head.endswith(", optimizer after step 2; all ranks end")
    assert trace.startswith("Traceback") and last == "ZeroDivisionError: a mistake of ours"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "failed"] and events[1]["error"] == last
    assert train(ranks, 1, tiny_words(tiny_data, f"run_dir={run}")).code == 0
    assert len(computed(run)) == 20


def failing(words: list[str], run_dir: Path) -> Ended:
    """In the third step rank 1 fails, and rank 0 by that; as rank 1 lives on here, rank 0 is told what its connection would tell it."""
    from hybrid_megatron.training import step

    plain, calls = step.squared_gradient_norm, []

    def squared_gradient_norm(optimizer):
        calls.append(optimizer)
        if len(calls) < 3:
            return plain(optimizer)
        if os.environ["RANK"] == "1":
            raise ZeroDivisionError("a mistake of ours")
        while not any(folder_of(run_dir).glob("given_up_*")):
            time.sleep(0.01)
        raise RuntimeError("Connection closed by peer")

    with unittest.mock.patch.object(step, "squared_gradient_norm", squared_gradient_norm):
        return command(words)


def test_timeout_of_groups(ranks):
    first, second = ranks.run(2, waits_for_nobody)
    assert 0.9 < first < 20


def waits_for_nobody() -> float:
    """Seconds after which rank 0 gives up waiting for rank 1, the long timeout having been made short."""
    import torch

    from hybrid_megatron.config.schema import ParallelConfig
    from hybrid_megatron.parallel import start

    with start(ParallelConfig(), 0, timedelta(seconds=600)) as state:
        state.highest(0)
        state.set_timeout(timedelta(seconds=1))
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            if state.rank == 0:
                stack.enter_context(pytest.raises(RuntimeError, match="[Tt]imed out"))
                torch.distributed.all_reduce(torch.zeros(1))
            else:
                time.sleep(3)
        return time.monotonic() - began


def test_timeouts_follow_the_watchdog(tiny_data):
    from hybrid_megatron.training.watchdog import group_timeout

    settings = tiny_config(tiny_data, "watchdog.step_seconds=100", "watchdog.first_step_seconds=1000").watchdog
    assert group_timeout(settings, warm=True) > timedelta(seconds=110) and group_timeout(settings, warm=False) > timedelta(seconds=1010)
    settings.step_seconds = None
    assert group_timeout(settings, warm=True) == group_timeout(settings, warm=False) >= timedelta(days=1)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sleeps", "holds_the_interpreter"])
def test_hanging_process_ends_and_is_started_again(ranks, tiny_data, tmp_path, how):
    """Its own threads say where it is only if they get to run; else the others say that it is silent, and C code prints its stack."""
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "checkpoint.interval_steps=4", "watchdog.step_seconds=15")
    ended = Process([how, *words], processes=2, module=("tests.cpu.disturbed",)).end()
    assert ended.code == 1
    [hang] = [line for line in ended.err.splitlines() if line.startswith("hang       ")]
    [culprit] = [line for line in ended.err.splitlines() if "<- the others wait for it" in line]
    assert "watchdog.step_seconds=15" in hang and culprit.strip().startswith("rank 1 (")
    if how == "sleeps":
        assert "): data after step 6 since " in culprit
        stacks = (run / "logs/stacks/rank_00001_step_00000006.txt").read_text()
    else:
        assert "no sign of life for" in culprit
        stacks = ended.err
    assert f"in {how}" in stacks
    ended = train(ranks, 2, words)
    assert ended.code == 0 and "resumed    step_00000004" in ended.out and len(computed(run)) == 20


@pytest.mark.slow
def test_failing_process_is_shown_by_torchrun_too(tiny_data, tmp_path):
    run = tmp_path / "run"
    ended = Process(["raises", *tiny_words(tiny_data, f"run_dir={run}")], processes=2, module=("tests.cpu.disturbed",)).end()
    assert ended.code == 1
    assert ended.err.count("ZeroDivisionError: a mistake of ours") == 2 and "Root Cause" in ended.err
    [head] = [line for line in ended.err.splitlines() if line.startswith("failed     ")]
    assert "rank 1 on " in head and "data after step 6" in head


@pytest.mark.parametrize("words", [["watchdog.step_seconds=0"], ["watchdog.first_step_seconds=10", "watchdog.step_seconds=20"]])
def test_settings(tiny_data, tmp_path, words):
    from hybrid_megatron.config.validate import validate
    from hybrid_megatron.errors import ConfigError

    with pytest.raises(ConfigError) as refused:
        validate(tiny_config(tiny_data, f"run_dir={tmp_path}", *words), 1)
    [problem] = refused.value.problems
    assert problem.startswith(words[0])


def test_without_a_watchdog(ranks, tiny_data, tmp_path):
    run = tmp_path / "run"
    assert train(ranks, 1, tiny_words(tiny_data, f"run_dir={run}", "train.tokens=1536", "watchdog.step_seconds=null")).code == 0
    assert [each.phase for each in read_heartbeats(run)] == ["ended"] and not Path(run / "logs/stacks").exists()
