"""python -m launch checkpoint list | verify | prune."""

import contextlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_megatron.training.run_folder import RunFolder
from launch import checkpoint as checkpoint_command
from tests.cpu.runs import CHECKOUT, Ended, checkpoints, snapshot, train
from tests.cpu.test_bad_input import flip
from tests.cpu.tiny import tiny_words


def command(*words: object) -> Ended:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            checkpoint_command.main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
    return Ended(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def finished(ranks, tiny_data, tmp_path_factory) -> Path:
    """A run of ten steps with rolling checkpoints after steps 2, 4, 5, 7 and 8 and permanent ones after 3, 6, 9 and 10."""
    run = tmp_path_factory.mktemp("finished") / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "train.tokens=5120", "checkpoint.interval_steps=1", "checkpoint.keep_last=20")
    words += ["checkpoint.permanent_interval_steps=3", "parallel.tensor=2"]
    assert train(ranks, 2, words).code == 0
    shutil.rmtree(run / "checkpoints/step_00000001")
    return run


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def test_list(run):
    (run / "checkpoints/step_00000011.partial").mkdir()
    (run / "checkpoints/step_00000004").rename(run / "checkpoints/step_00000004.damaged")
    (run / "checkpoints/step_00000005/complete.json").unlink()
    (run / "checkpoints/step_00000006").rename(run / "checkpoints/mine")
    ended = command("list", run)
    assert ended.code == 0 and not ended.err
    head, *lines = ended.out.splitlines()
    assert head.split() == ["name", "step", "tokens", "form", "layout", "size", "age", "status"]
    found = {line.split()[0]: line.split() for line in lines}
    assert list(found) == checkpoints(run)
    assert found["step_00000010"][1:6] == ["10", "5,120", "permanent", "tensor", "2"] and found["step_00000010"][-1] == "complete"
    assert found["step_00000007"][3] == "rolling"
    assert [found[name][-1] for name in ("step_00000011.partial", "step_00000004.damaged", "mine")] == ["unfinished", "damaged", "kept"]
    assert found["step_00000005"][-2:] == ["no", "marker"]

    entries = {entry["name"]: entry for entry in json.loads(command("list", run, "--json").out)}
    assert list(entries) == checkpoints(run)
    newest = entries["step_00000010"]
    assert (newest["step"], newest["tokens"], newest["form"], newest["layout"]["tensor"]) == (10, 5120, "permanent", 2)
    assert newest["bytes"] == sum(path.stat().st_size for path in (run / "checkpoints/step_00000010").iterdir())
    assert newest["status"] == "complete" and 0 <= newest["age_seconds"] < 600
    assert "step" not in entries["step_00000005"]


@pytest.mark.parametrize("name", [".metadata", "integrity.json", "__0_0.distcp"])
def test_a_missing_file_is_seen_in_the_list(run, name):
    (run / "checkpoints/step_00000007" / name).unlink()
    status = {entry["name"]: entry["status"] for entry in json.loads(command("list", run, "--json").out)}
    assert status["step_00000007"] == "files missing" and status["step_00000010"] == "complete"


def test_verify(run):
    ended = command("verify", run)
    assert ended.code == 0 and not ended.err and ended.out.splitlines() == [f"{name}: whole" for name in checkpoints(run)]
    flip(run / "checkpoints/step_00000004/__0_0.distcp", 10_000)
    (run / "checkpoints/step_00000004/.metadata").unlink()
    flip(run / "checkpoints/step_00000007/complete.json", 11)  # another number of steps
    ended = command("verify", run)
    assert ended.code == 2
    assert [line.split(": ")[0] for line in ended.errors] == [
        str(run / "checkpoints" / name) for name in ("step_00000004/.metadata", "step_00000004/__0_0.distcp", "step_00000007/complete.json")
    ]
    assert "step_00000004: 2 of its files damaged" in ended.out and "step_00000005: whole" in ended.out
    assert command("verify", run, "step_00000005", "step_00000010").code == 0
    assert command("verify", run, "step_00000004").code == 2
    (run / "empty/checkpoints").mkdir(parents=True)
    assert command("verify", run / "empty").out == "there is no checkpoint to verify\n"
    ended = command("verify", run, "step_00000099")
    assert ended.code == 2 and "there is no such checkpoint; the run has step_00000002, step_00000003" in ended.errors[0]


def test_prune_by_rule(run):
    before = snapshot(run)
    ended = command("prune", run, "--keep", 2, "--permanent-every", 6, "--dry-run")
    assert ended.code == 0 and snapshot(run) == before
    assert [line.split()[2] for line in ended.out.splitlines()[:-1]] == [f"step_0000000{step}" for step in (2, 4, 5, 3, 9)]
    assert ended.out.splitlines()[-1].startswith("would remove 5 checkpoints, ")
    ended = command("prune", run, "--keep", 2, "--permanent-every", 6)
    assert ended.code == 0 and ended.out.splitlines()[-1].startswith("removed 5 checkpoints, ")
    assert checkpoints(run) == ["step_00000006", "step_00000007", "step_00000008", "step_00000010"], "10 is the newest, whatever the rule"
    assert command("prune", run, "--keep", 2, "--permanent-every", 6).out.startswith("removed 0 checkpoints")


def test_prune_never_removes_the_newest_whole_one(run):
    """By its hashes: the ones after it are damaged."""
    for step in (8, 9, 10):
        flip(run / f"checkpoints/step_{step:08d}/__0_0.distcp", 10_000)
    assert command("prune", run, "--keep", 0, "--permanent-every", 1000).code == 0
    assert checkpoints(run) == ["step_00000007"]
    flip(run / "checkpoints/step_00000007/__0_0.distcp", 10_000)
    ended = command("prune", run, "--keep", 0)
    assert ended.code == 2 and "none of its checkpoints is whole, so none is removed" in ended.errors[0]
    assert checkpoints(run) == ["step_00000007"]


def test_prune_removes_damaged_ones_only_if_asked(run):
    (run / "checkpoints/step_00000008").rename(run / "checkpoints/step_00000008.damaged")
    assert command("prune", run, "--keep", 0).code == 0
    assert "step_00000008.damaged" in checkpoints(run)
    assert command("prune", run, "--damaged").code == 0
    assert checkpoints(run) == [f"step_{step:08d}" for step in (3, 6, 9, 10)]


def test_prune_while_a_run_holds_the_folder(run):
    before = checkpoints(run)
    holder = RunFolder(run)
    try:
        ended = command("prune", run, "--keep", 0)
    finally:
        holder.close()
    assert ended.code == 2 and "a run is training in this folder" in ended.errors[0]
    assert checkpoints(run) == before


WRONG = {
    "no rule": (["prune", "RUN"], "no rule given"),
    "negative": (["prune", "RUN", "--keep", "-1"], "--keep -1: it must be 0 or more"),
    "every 0": (["prune", "RUN", "--permanent-every", "0"], "--permanent-every 0: it must be 1 or more"),
    "no run": (["list", "RUN/checkpoints"], "it has no folder checkpoints/"),
    "path out": (["verify", "RUN", "../checkpoints/step_00000010"], "there is no such checkpoint"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_words(run, case):
    words, sentence = WRONG[case]
    before = checkpoints(run)
    ended = command(*[word.replace("RUN", str(run)) for word in words])
    assert ended.code == 2 and sentence in ended.errors[0]
    assert checkpoints(run) == before


def test_it_needs_no_torch(run):
    """A login node answers at once."""
    program = (
        "import sys; from launch.__main__ import main; main(sys.argv[1:]); assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program, "checkpoint", "list", run], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0 and "step_00000010" in done.stdout, done.stderr


def test_what_is_missing_is_said_in_one_sentence():
    for word in ("list", "verify", "prune"):
        ended = command(word)
        [said] = ended.errors
        assert ended.code == 2
        assert said.startswith("the following arguments are required: RUN_DIR; see ") and said.endswith("-m launch checkpoint --help")


def test_one_is_one(run):
    assert command("prune", run, "--keep", 4).out.splitlines()[-1].startswith("removed 1 checkpoint, ")
