"""python -m launch preflight: one, two and four ranks on one or more nodes, and what each of them may find wrong."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybrid_megatron.preflight.folders import PREFIX, look_for, open_run_folder
from tests.cpu import preflight_cells
from tests.cpu.preflight_cells import Said, names_left
from tests.cpu.runs import CHECKOUT, train
from tests.cpu.test_full_disk import mounted
from tests.cpu.tiny import tiny_words

CHECKS = {"recipe", "versions", "disk", "data.train", "data.valid", "run folder", "room for checkpoints", "clocks"}


@pytest.fixture
def words(tiny_data, tmp_path) -> list[str]:
    return tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}")


@pytest.fixture
def verdict_files(tmp_path) -> dict[str, str]:
    return {name: str(tmp_path / name) for name in ("HYBRID_MEGATRON_PREFLIGHT", "HYBRID_MEGATRON_BAD_NODES")}


def preflight(ranks, size: int, words: list[str], **how) -> Said:
    """The command on `size` ranks; they end alike, and rank 0 alone speaks."""
    said = ranks.run(size, _with, words, how)
    assert len({each.code for each in said}) == 1, said
    assert not any(each.out or each.err for each in said[1:]), said
    return said[0]


def _with(words: list[str], how: dict) -> Said:
    return preflight_cells.command(words, **how)


@pytest.mark.parametrize("size, per_node", [(1, 1), (4, 2), (4, 1)])
def test_all_is_fine(ranks, words, tmp_path, size, per_node):
    said = preflight(ranks, size, words, per_node=per_node)
    assert (said.code, said.err, said.verdict) == (0, "", "ok, as far as it was examined"), said
    heard = {line.split(":")[0] for what in ("fine", "warning") for line in ", ".join(said.lines(what)).split(", ")}
    assert heard >= CHECKS - {"disk", "versions"}, "those two are of the machine that this runs on"
    assert [line.split(":")[0] for line in said.lines("unexamined")] == ["GPUs", "speed", "all-reduce"]
    if size == 4:
        assert all(f"within node{i + 1} " in said.out for i in range(2) if per_node == 2) and "over all nodes " in said.out
    assert names_left(tmp_path) == [], "nothing is left behind, and no run folder is made"


def test_a_login_node_examines_a_recipe_for_as_many_processes_as_it_needs(tiny_data, tmp_path):
    """Without torchrun a layout of two ranks is no mistake; what only a GPU node can tell is named."""
    words = tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}", "parallel.tensor=2", "model.kernels.norm=te")
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - environment.keys():
            patch.delenv(name)
        patch.setenv("RANK", "0")  # which the command inside a rank asks for
        said = preflight_cells.command(words)
    assert said.code == 0, said
    for expected in ("torch sees none here", "Transformer Engine: model.kernels.norm=te: "):
        assert any(expected in line for line in said.lines("unexamined")), said


def test_a_slow_gpu_makes_its_node_bad(ranks, words, verdict_files):
    Path(verdict_files["HYBRID_MEGATRON_PREFLIGHT"]).write_text("refused an earlier one\n")
    said = preflight(ranks, 4, words, per_node=2, environment=verdict_files, pretend="slow")
    assert (said.code, said.verdict) == (3, "bad nodes: node2")
    assert said.lines("bad node")[0].startswith("speed: rank 3 (GPU 1 of node2) reaches 350 TFLOP/s (GEMM), less than 85% of the 700")
    assert Path(verdict_files["HYBRID_MEGATRON_BAD_NODES"]).read_text() == "node2\n"
    assert Path(verdict_files["HYBRID_MEGATRON_PREFLIGHT"]).read_text() == "bad_nodes\n"


def test_a_gpu_that_was_slow_once_is_not_given_up(ranks, words, verdict_files):
    Path(verdict_files["HYBRID_MEGATRON_BAD_NODES"]).write_text("node9\n")
    said = preflight(ranks, 4, words, per_node=2, environment=verdict_files, pretend="slow once")
    assert said.code == 0 and any("reaches 350" in line and line.endswith("s later") for line in said.lines("warning")), said
    assert Path(verdict_files["HYBRID_MEGATRON_PREFLIGHT"]).read_text() == "ok\n"
    assert not Path(verdict_files["HYBRID_MEGATRON_BAD_NODES"]).exists(), "an earlier preflight's is gone"


def test_a_node_whose_gpus_have_gone(ranks, words):
    """Nothing is measured then: the others would wait for it."""
    said = preflight(ranks, 4, words, per_node=2, pretend="half without")
    assert (said.code, said.verdict) == (3, "bad nodes: node2")
    assert said.lines("bad node")[0].startswith("GPUs: node2 sees 0 GPUs for 2 processes") and "speed" not in said.out


# ---- mistakes: exit code 2 -----------------------------------------------------------------------------------------------------


def refused(ranks, words: list[str], size: int = 2, **how) -> str:
    said = preflight(ranks, size, words, **how)
    assert said.code == 2 and said.verdict == "refused: this would fail on any node", said
    return "\n".join(said.lines("refused"))


def test_a_broken_recipe(ranks, words, verdict_files):
    refused(ranks, [*words, "model.num_layer=3", "seed=x"], environment=verdict_files)
    told = Path(verdict_files["HYBRID_MEGATRON_PREFLIGHT"]).read_text()
    assert told.startswith("refused recipe: override model.num_layer=3: ") and "; recipe: override seed=x: " in told
    assert told.count("\n") == 1
    assert "parallel.tensor=4" in refused(ranks, [*words, "parallel.tensor=4"])


def test_no_recipe(ranks, verdict_files):
    for wrong in (["--fast"], ["seed=1"]):
        [said] = ranks.run(1, _with, wrong, {"environment": verdict_files})
        assert said.code == 2 and said.err.startswith(f"error: {wrong[0]}: the recipe comes first")
        assert Path(verdict_files["HYBRID_MEGATRON_PREFLIGHT"]).read_text().startswith("refused ")


def test_data_that_cannot_be_used(ranks, tiny_data, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    words = tiny_words(data, f"run_dir={tmp_path / 'run'}")
    assert "made with the tokenizer tiny" in refused(ranks, [*words, "data.tokenizer=llama3"])
    shutil.rmtree(data / "cache")
    lines = refused(ranks, words).splitlines()
    assert [line.partition("=")[0] for line in lines] == ["data.train", "data.valid"]
    assert f"python -m data_prep build-cache {words[0]} data.train={data / 'train'}" in lines[0]
    (data / "train.bin").unlink()
    assert "train.bin does not exist" in refused(ranks, words)


def test_data_missing_on_one_node(ranks, words):
    """On a node's own disk it is a mistake; on a shared one the node that does not see it is bad."""
    assert "node1, node2, node3 can use it, node4 cannot: data.train=" in refused(ranks, words, 4, per_node=1, pretend="no data")
    said = preflight(ranks, 4, words, per_node=1, pretend="no data, shared")
    assert (said.code, said.verdict) == (3, "bad nodes: node4"), said
    assert len(said.lines("bad node")) == 2 and all("look at its mount there" in line for line in said.lines("bad node"))


def test_run_folder_that_cannot_be_written(ranks, tiny_data, tmp_path):
    with mounted(tmp_path / "full", "64k"):
        subprocess.run(["mount", "-o", "remount,ro", tmp_path / "full"], check=True)
        told = refused(ranks, tiny_words(tiny_data, f"run_dir={tmp_path / 'full' / 'run'}"))
        assert "cannot be written on node1 (Read-only file system)" in told


def test_disk_too_small_for_the_checkpoints(ranks, tiny_data, tmp_path):
    """A checkpoint of this model takes about 1 MB; three must fit, of which two stay."""
    with mounted(tmp_path / "small", "2m"):
        told = refused(ranks, tiny_words(tiny_data, f"run_dir={tmp_path / 'small' / 'run'}"), size=1)
        assert told.startswith("room for checkpoints: ") and "so the 3 that must fit do not" in told
        assert names_left(tmp_path / "small") == []


def test_a_run_folder_of_another_run_and_a_checkpoint_to_start_from(ranks, tiny_data, tmp_path):
    run = tmp_path / "run"
    assert train(ranks, 1, tiny_words(tiny_data, f"run_dir={run}", "train.tokens=4096"), stop=(4, 0, "SIGTERM")).code == 143
    before = sorted(path.name for path in run.rglob("*"))
    said = preflight(ranks, 2, tiny_words(tiny_data, f"run_dir={run}", "train.tokens=4096"))
    assert said.code == 0 and sorted(path.name for path in run.rglob("*")) == before
    told = refused(ranks, tiny_words(tiny_data, f"run_dir={run}", "train.tokens=4096", "optimizer.peak_lr=1"))
    assert "optimizer.peak_lr: this run has 0.003, the recipe now says 1.0" in told
    next_stage = tiny_words(tiny_data, f"run_dir={tmp_path / 'next'}")
    said = preflight(ranks, 2, [*next_stage, f"init_from={run}"])
    assert said.code == 0 and "init_from" in said.lines("fine")[0]
    assert "does not exist" in refused(ranks, [*next_stage, f"init_from={tmp_path / 'nowhere'}"])
    assert "and this model has it as [128, 32]" in refused(ranks, [*next_stage, f"init_from={run}", "model.ffn_size=64"])


# ---- ranks that do not answer, or fail -----------------------------------------------------------------------------------------


def test_a_rank_that_never_comes(ranks, words):
    said = preflight(ranks, 3, words, per_node=2, pretend="absent", believed=4)
    assert said.code == 3
    assert said.lines("bad node")[0].startswith("ranks: rank 3 of node2 did not answer within 3 s when asked for: who is there")


def test_a_rank_that_dies_on_the_way(ranks, words, tmp_path):
    """The one that answers no more is named, by all others alike, and nothing is left in the folder."""
    said = ranks.run(4, _with, words, {"per_node": 2, "pretend": "dies"})
    assert [each.code for each in said] == [3, 3, 3, 77]
    assert said[0].lines("bad node")[0].startswith("ranks: rank 3 of node2 did not answer within 3 s when asked for: GPUs")
    assert names_left(tmp_path) == []


def test_a_rank_that_fails_is_no_silent_one(ranks, words):
    said = preflight(ranks, 4, words, per_node=2, pretend="driver")
    assert (said.code, said.verdict) == (3, "bad nodes: node2")
    told = "GPUs: rank 3 (process 1 of node2): RuntimeError: CUDA error: unknown error (in preflight_cells.py"
    assert said.lines("bad node")[0].startswith(told)
    said = preflight(ranks, 2, words, pretend="driver everywhere")
    assert said.code == 1 and said.lines("failed")[0].startswith("speed: rank 0")


def test_a_rank_that_does_not_enter_the_all_reduce(ranks, words):
    said = preflight(ranks, 4, words, per_node=2, pretend="stays away")
    assert said.code == 3 and said.lines("bad node") == ["all-reduce: it does not end within node2"]


# ---- the run folder ------------------------------------------------------------------------------------------------------------


def test_files_of_a_killed_preflight_are_removed_by_a_later_one(tmp_path, monkeypatch):
    monkeypatch.setattr("hybrid_megatron.preflight.folders.SEEN_WITHIN_SECONDS", 0.2)
    old, young, foreign = (tmp_path / name for name in (f"{PREFIX}a-node1", f"{PREFIX}b-node1", "metrics.jsonl"))
    for path in (old, young, foreign):
        path.write_text("node1")
    for path in (old, foreign):
        os.utime(path, (time.time() - 3600,) * 2)
    with open_run_folder(tmp_path / "run", "c", "node1") as mine:
        assert not old.exists() and young.exists() and foreign.exists() and mine.problem == ""
        files = {"node1": mine.file, "node2": str(tmp_path / "never"), "node3": str(young)}
        assert look_for(files) == ["node2", "node3"], "one never comes, one has another's contents"
    assert names_left(tmp_path) == [young.name, foreign.name]


@pytest.mark.slow
def test_preflight_through_torchrun(words, tmp_path):
    """As a job runs it: two processes, a mistake, torchrun's own exit code, and the verdict in the file."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT), "HYBRID_MEGATRON_PREFLIGHT": str(tmp_path / "verdict")}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "launch", "preflight"]
    for override, code, verdict in ((["data.tokenizer=llama3"], 1, "refused data.train"), ([], 0, "ok\n")):
        done = subprocess.run([*torchrun, *words, *override], cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done
        assert (tmp_path / "verdict").read_text().startswith(verdict) and done.stdout.splitlines()[-1].startswith("verdict    "), done
