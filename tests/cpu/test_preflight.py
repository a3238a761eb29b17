"""python -m launch preflight: one, two and four ranks on one or more nodes, and what each of them may find wrong."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from hybrid_megatron.preflight.shared_folder import PREFIX, open_probe
from tests.cpu import preflight_cells
from tests.cpu.preflight_cells import Said
from tests.cpu.runs import CHECKOUT, train
from tests.cpu.test_full_disk import mounted
from tests.cpu.tiny import tiny_words

# Software is that of the tests' own environment, and no rank of theirs is slow to start.
CHECKS = [
    "recipe",
    "versions",
    "GPUs",
    "memory",
    "GPU health",
    "disk",
    "data.train",
    "data.valid",
    "checkpoint",
    "disk of run",
    "environment",
]


@pytest.fixture
def words(tiny_data, tmp_path) -> list[str]:
    return tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}", "--wait=30")


@pytest.fixture
def data(tiny_data, tmp_path) -> Path:
    """A copy of the tiny data, to be damaged."""
    shutil.copytree(tiny_data, tmp_path / "data")
    return tmp_path / "data"


def preflight(ranks, size: int, words: list[str], **how) -> Said:
    """The command on `size` ranks; they end alike, and rank 0 alone speaks."""
    said = ranks.run(size, _with, words, how)
    assert len({each.code for each in said}) == 1, said
    assert not any(each.out or each.err for each in said[1:]), said
    return said[0]


def _with(words: list[str], how: dict) -> Said:
    return preflight_cells.command(words, **how)


@pytest.mark.parametrize("size, per_node", [(1, 1), (2, 2), (4, 2), (4, 1)])
def test_all_is_fine(ranks, words, tmp_path, size, per_node):
    said = preflight(ranks, size, words, per_node=per_node)
    assert (said.code, said.err) == (0, ""), said
    assert said.line("verdict") == "ok"
    nodes = size // per_node
    between = ["network", "wandb", "run folder", "locks", "clocks"] if nodes > 1 else ["wandb", "run folder", "locks"]
    heard = set(said.line("fine").split(", ")) | {line[11:].split(":")[0] for line in said.out.splitlines() if line.startswith("warning")}
    assert heard == {*CHECKS, *between, "speed", *(["all-reduce"] if size > 1 else [])}
    assert list(tmp_path.iterdir()) == [], "nothing is left behind, and no run folder is made"


def test_everything_as_numbers_and_for_the_batch_script(ranks, words, tmp_path):
    files = {name: str(tmp_path / name) for name in preflight_cells.FILES}
    Path(files["HYBRID_MEGATRON_PREFLIGHT"]).write_text("refused an earlier one\n")
    said = preflight(ranks, 4, [*words, "--json"], per_node=2, environment=files)
    told = json.loads(said.out)
    assert (told["verdict"], told["exit_code"], told["bad_nodes"]) == ("ok", 0, [])
    assert told["ranks"] == {"node1": [0, 1], "node2": [2, 3]}
    assert [each["rank"] for each in told["measured"]] == [0, 1, 2, 3]
    for each in told["measured"]:
        assert each["speed"]["tflops"] > 0 and each["speed"]["gbytes"] > 0 and each["device"]["name"] == "CPU"
        assert set(each["all_reduce_gbytes_per_second"]) == {f"within {each['node']}", "over all nodes"}
    assert all({"check", "level", "found", "rule", "way_out", "nodes"} == set(each) for each in told["findings"])
    assert list(told["seconds"]) == ["start", "waiting", "recipe", "facts", "between nodes", "speed", "all-reduce", "in all"]
    assert sum(list(told["seconds"].values())[:-1]) == pytest.approx(told["seconds"]["in all"], abs=0.1)
    assert Path(files["HYBRID_MEGATRON_PREFLIGHT"]).read_text() == "ok\n"
    assert not Path(files["HYBRID_MEGATRON_BAD_NODES"]).exists()


def test_a_slow_gpu_makes_its_node_bad(ranks, words, tmp_path):
    files = {name: str(tmp_path / name) for name in preflight_cells.FILES}
    said = preflight(ranks, 4, words, per_node=2, environment=files, pretend="slow")
    assert said.code == 3
    assert said.line("bad node").startswith("GEMM: rank 3 (GPU 1 of node2) reaches 350 TFLOP/s; the median is 700")
    assert said.line("verdict") == "bad nodes: node2"
    assert Path(files["HYBRID_MEGATRON_BAD_NODES"]).read_text() == "node2\n"
    assert Path(files["HYBRID_MEGATRON_PREFLIGHT"]).read_text() == "bad_nodes\n"


# ---- mistakes: exit code 2 -----------------------------------------------------------------------------------------------------


def refused(ranks, words: list[str], size: int = 2, **how) -> str:
    said = preflight(ranks, size, words, **how)
    assert said.code == 2 and said.line("verdict") == "refused: this would fail on any node", said
    return said.line("refused")


def test_a_broken_recipe(ranks, words, tmp_path):
    files = {"HYBRID_MEGATRON_PREFLIGHT": str(tmp_path / "verdict")}
    said = preflight(ranks, 2, [*words, "model.num_layer=3", "seed=x"], environment=files)
    assert said.code == 2
    told = Path(files["HYBRID_MEGATRON_PREFLIGHT"]).read_text()
    assert (
        told.startswith("refused recipe: override model.num_layer=3: ") and "; recipe: override seed=x: " in told and told.count("\n") == 1
    )
    assert "parallel.tensor=3" in refused(ranks, [*words, "parallel.tensor=3", "model.num_kv_heads=3", "model.num_heads=3"])


def test_no_recipe_and_unknown_options(ranks, words, tmp_path):
    files = {"HYBRID_MEGATRON_PREFLIGHT": str(tmp_path / "verdict")}
    for wrong, told in ((["--fast"], "no option --fast"), (["--wait=no"], "--wait no: it must be"), (["seed=1"], "no recipe given")):
        [said] = ranks.run(1, _with, wrong, {"environment": files})
        assert said.code == 2 and said.err.startswith("error: ") and told in said.err
        assert Path(files["HYBRID_MEGATRON_PREFLIGHT"]).read_text().startswith("refused ")


def test_missing_data_and_missing_index_maps(ranks, data, tmp_path):
    words = tiny_words(data, f"run_dir={tmp_path / 'run'}")
    shutil.rmtree(data / "cache")
    said = preflight(ranks, 2, words)
    assert said.code == 2
    lines = [line for line in said.out.splitlines() if line.startswith("refused")]
    assert [line.split()[1] for line in lines] == ["data.train:", "data.valid:"]
    assert f"python -m data_prep build-cache {words[0]} data.train={data / 'train'}" in lines[0]
    (data / "train.bin").unlink()
    assert "train.bin does not exist" in preflight(ranks, 2, words).out


def test_another_tokenizer(ranks, words):
    assert "made with the tokenizer tiny" in preflight(ranks, 2, [*words, "data.tokenizer=llama3"]).out


def test_data_missing_on_one_node(ranks, data, tmp_path):
    """On a node's own disk it is a mistake; on a shared one the node that does not see it is bad."""
    words = tiny_words(data, f"run_dir={tmp_path / 'run'}", "--wait=30")
    said = preflight(ranks, 4, words, per_node=1, pretend="no data")
    assert said.code == 2 and "node1, node2, node3 can use it, node4 cannot: data.train=" in said.out, said
    said = preflight(ranks, 4, words, per_node=1, pretend="no data on nfs")
    assert said.code == 3 and said.line("verdict") == "bad nodes: node4", said
    assert all("look at its mount there" in line for line in said.out.splitlines() if line.startswith("bad node"))


def test_run_folder_that_cannot_be_written(ranks, tiny_data, tmp_path):
    with mounted(tmp_path / "full", "64k"):
        os.system(f"mount -o remount,ro {tmp_path / 'full'}")
        said = preflight(ranks, 2, tiny_words(tiny_data, f"run_dir={tmp_path / 'full' / 'run'}"))
        assert said.code == 2 and "cannot be written on node1 (Read-only file system)" in said.out, said


def test_disk_too_small_for_the_checkpoints(ranks, tiny_data, tmp_path):
    """A checkpoint of this model takes about 1 MB; three must fit, of which two stay."""
    with mounted(tmp_path / "small", "2m"):
        told = refused(ranks, tiny_words(tiny_data, f"run_dir={tmp_path / 'small' / 'run'}"), size=1)
        assert told.startswith("disk of run: run_dir: ") and "for 3 of them" in told
        assert list((tmp_path / "small").iterdir()) == []


# ---- checkpoints ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half_run(ranks, tiny_data, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("preflight") / "run"
    assert train(ranks, 1, tiny_words(tiny_data, f"run_dir={run}", "train.tokens=4096"), stop=(4, 0, "SIGTERM")).code == 143
    return run


def test_checkpoints_are_whole(ranks, half_run, tiny_data, tmp_path):
    """Its own newest one: damaged, it is passed over. One to start from: damaged, nothing can begin."""
    run = tmp_path / "run"
    shutil.copytree(half_run, run)
    own, other = tiny_words(tiny_data, f"run_dir={run}", "train.tokens=4096"), tiny_words(tiny_data, f"run_dir={tmp_path / 'new'}")
    [checkpoint] = (run / "checkpoints").glob("step_*")
    before = sorted(path.name for path in run.rglob("*"))
    said = preflight(ranks, 2, own, per_node=1)
    assert said.code == 0 and "newest checkpoint" in said.line("fine")
    assert sorted(path.name for path in run.rglob("*")) == before
    said = preflight(ranks, 2, [*other, f"init_from={run}"], per_node=1)
    assert said.code == 0 and "init_from" in said.line("fine")
    [shard, *_] = sorted(checkpoint.glob("*.distcp"))
    with open(shard, "r+b") as file:
        file.truncate(shard.stat().st_size // 2)
    said = preflight(ranks, 2, own, per_node=1)
    assert said.code == 0 and f"newest checkpoint: {shard}: " in said.out and "were written, so the checkpoint is not whole" in said.out
    assert f"init_from: {shard}: " in refused(ranks, [*other, f"init_from={run}"])
    shard.unlink()
    assert "missing, so the checkpoint is not whole" in refused(ranks, [*other, f"init_from={checkpoint}"])
    assert "does not exist" in refused(ranks, [*other, f"init_from={tmp_path / 'nowhere'}"])


def test_a_run_folder_of_another_run(ranks, half_run, tiny_data):
    said = preflight(ranks, 2, tiny_words(tiny_data, f"run_dir={half_run}", "train.tokens=4096", "optimizer.peak_lr=1"))
    assert said.code == 2 and "optimizer.peak_lr: this run has 0.003, the recipe now says 1.0" in said.out


# ---- ranks that do not answer, or fail -----------------------------------------------------------------------------------------


def test_a_rank_that_never_comes(ranks, words, tmp_path, monkeypatch):
    """Three of four: its neighbour's node is named. The whole second node: Slurm's list of nodes says which."""
    files = {name: str(tmp_path / name) for name in preflight_cells.FILES}
    said = ranks.run(3, _with, [*words, "--wait=2"], {"per_node": 2, "size": 4, "environment": files})
    assert [each.code for each in said] == [3, 3, 3] and not any(each.out for each in said[1:])
    assert said[0].line("bad node").startswith("ranks: rank 3 of node2 did not answer within 2 s (asked for: hello)")
    assert Path(files["HYBRID_MEGATRON_BAD_NODES"]).read_text() == "node2\n"
    assert max(each.seconds for each in said) < 20
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho node1\necho node7\n")
    scontrol.chmod(0o755)
    slurm = files | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[1,7]"}
    said = ranks.run(2, _with, [*words, "--wait=2"], {"per_node": 2, "size": 4, "environment": slurm})
    assert [each.code for each in said] == [3, 3] and said[0].line("verdict") == "bad nodes: node7"
    said = ranks.run(2, _with, [*words, "--wait=2"], {"per_node": 2, "size": 4})
    assert [each.code for each in said] == [1, 1] and said[0].line("verdict") == "not found out; try again"


def test_a_rank_that_dies_on_the_way(ranks, words, tmp_path):
    """The one that answers no more is named, by all others alike, and nothing is left in the folder."""
    said = ranks.run(4, _with, [*words, "--wait=3"], {"per_node": 2, "pretend": "dies"})
    assert [each.code for each in said] == [3, 3, 3, 77]
    assert said[0].line("bad node").startswith("ranks: rank 3 of node2 did not answer within 3 s (asked for: facts)")
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_fails_is_no_silent_one(ranks, words):
    said = preflight(ranks, 4, words, per_node=2, pretend="driver")
    assert said.code == 3 and said.line("verdict") == "bad nodes: node2"
    assert said.line("bad node").startswith(
        "facts: rank 3 (process 1 of node2): RuntimeError: CUDA error: unknown error (in preflight_cells.py"
    )
    said = preflight(ranks, 2, words, pretend="driver everywhere")
    assert said.code == 1 and said.line("failed").startswith("speed: rank 0")


def test_a_rank_that_does_not_enter_the_all_reduce(ranks, words):
    said = preflight(ranks, 4, words, per_node=2, pretend="stays away")
    assert said.code == 3 and said.line("bad node") == "all-reduce: an all-reduce within node2 does not end"


# ---- the run folder ------------------------------------------------------------------------------------------------------------


def test_files_of_a_killed_preflight_are_removed_by_a_later_one(tmp_path):
    old, young, foreign = (tmp_path / name for name in (f"{PREFIX}a-node1", f"{PREFIX}b-node1", "metrics.jsonl"))
    for path in (old, young, foreign):
        path.write_text("node1")
    for path in (old, foreign):
        os.utime(path, (time.time() - 3600,) * 2)
    with open_probe(tmp_path / "run", "c", "node1", locks=True) as probe:
        files = {"node1": probe.written.file}
        assert not old.exists() and young.exists() and foreign.exists()
        assert probe.look(files).lock == "held"
        with open_probe(tmp_path / "run", "d", "node1", locks=True) as another:  # of another job at the same time
            assert another.look({"node1": another.written.file}).lock == "held" and probe.look(files).lock == "held"
    assert sorted(path.name for path in tmp_path.iterdir()) == [young.name, foreign.name]


def test_a_lock_that_is_not_seen_and_a_file_that_comes_late(tmp_path):
    with open_probe(tmp_path, "a", "node1", locks=False) as probe:
        assert probe.look({"node1": probe.written.file}).lock == "not seen"
        seconds = probe.look({"node1": probe.written.file, "node2": str(tmp_path / "never")}).seconds
        assert seconds["node1"] < 1 and seconds["node2"] is None


def test_preflight_through_torchrun(tiny_data, tmp_path):
    """As a job runs it: two processes, a broken recipe, torchrun's own exit code, and the verdict in the file."""
    verdict = tmp_path / "verdict"
    words = tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}")
    ended = preflight_cells.torchrun(CHECKOUT, [*words, "data.tokenizer=llama3"], {"HYBRID_MEGATRON_PREFLIGHT": str(verdict)})
    assert ended.code == 1 and verdict.read_text().startswith("refused data.train: ")
    assert "verdict    refused: this would fail on any node" in ended.out
    ended = preflight_cells.torchrun(CHECKOUT, words, {"HYBRID_MEGATRON_PREFLIGHT": str(verdict)})
    assert (ended.code, verdict.read_text()) == (0, "ok\n")
    assert ended.out.splitlines()[-1] == "verdict    ok"
