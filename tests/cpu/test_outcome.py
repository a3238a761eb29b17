"""The file that tells whoever started a training how it ended."""

import errno
import json
from pathlib import Path

import pytest

from hybrid_megatron.errors import RunError
from hybrid_megatron.training import outcome
from tests.cpu.runs import Process, checkpoints, train
from tests.cpu.tiny import tiny_words

SHORT = ["train.tokens=2048"]


@pytest.fixture
def told(tmp_path) -> Path:
    """The file, with what an earlier process left in it."""
    path = tmp_path / "outcome"
    path.write_text("stopped SIGUSR1\n")
    return path


@pytest.mark.parametrize("size", [1, 2])
def test_complete_and_complete_again(ranks, tiny_data, tmp_path, told, size):
    words = tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}", *SHORT)
    for _ in range(2):
        assert train(ranks, size, words, outcome=told).code == 0
        assert told.read_text() == "complete\n"
        told.write_text("running 7\n")


@pytest.mark.parametrize("name, code, size, rank", [("SIGUSR1", 138, 2, 1), ("SIGTERM", 143, 1, 0), ("SIGINT", 130, 1, 0)])
def test_stopped(ranks, tiny_data, tmp_path, told, name, code, size, rank):
    words = tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}", *SHORT)
    assert train(ranks, size, words, stop=(2, rank, name), outcome=told).code == code
    assert told.read_text() == f"stopped {name}\n" and checkpoints(tmp_path / "run") == ["step_00000002"]


def test_crashed(ranks, tiny_data, tmp_path, told):
    """In a step, what stands there is how far it had resumed; before that, nothing."""
    words = tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}", *SHORT)
    assert train(ranks, 1, words, stop=(2, 0, "SIGTERM")).code == 143
    ranks.run(1, crashed_in_a_step, words, told)
    assert told.read_text() == "running 2\n"
    told.write_text("stopped SIGTERM\n")
    ranks.run(1, crashed_in_a_step, words, told, "build_trainer")
    assert not told.exists()
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "saved", "stopped", "start", "failed", "failed"]
    assert events[-1]["error"] == "ZeroDivisionError: a mistake of ours" and events[-1]["where"].endswith("loading after step 0")


def crashed_in_a_step(words: list[str], told: Path, where: str = "train_step") -> None:
    import unittest.mock

    from hybrid_megatron.training import loop
    from tests.cpu.runs import command

    with unittest.mock.patch.object(loop, where, side_effect=ZeroDivisionError("a mistake of ours")):
        with pytest.raises(ZeroDivisionError):
            command(words, outcome=told)


def test_refused_by_the_recipe_alone(tmp_path, told):
    ended = Process(["776m+gdn_nope_lh+pretrain_4k", "model.num_layer=3", "train.contxt=4096"], outcome=told).end()
    assert ended.code == 2
    assert told.read_text() == f"refused {'; '.join(ended.errors)}\n" and len(ended.errors) == 2


def test_refused_later_and_told_by_rank_0_alone(ranks, tiny_data, tmp_path, told):
    words = tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}", "data.train=/nowhere/train")
    [said] = train(ranks, 2, words, outcome=told).errors
    assert told.read_text() == f"refused {said}\n"


def test_without_the_variable_nothing_is_written(ranks, tiny_data, tmp_path):
    assert train(ranks, 1, tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}", *SHORT)).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_file_that_cannot_be_written_is_a_warning(ranks, tiny_data, tmp_path):
    ended = train(ranks, 1, tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}", *SHORT), outcome=tmp_path / "missing/outcome")
    assert ended.code == 0
    assert ended.err.splitlines()[-1].endswith("cannot be written (No such file or directory), so it does not say: complete")


def test_on_a_full_disk_the_file_is_overwritten(told, monkeypatch):
    def no_room(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv(outcome.VARIABLE, str(told))
    monkeypatch.setattr(Path, "write_text", no_room)
    outcome.tell_refused(RunError("full"))
    assert told.read_text() == "refused full\n" and [path.name for path in told.parent.iterdir()] == [told.name]
