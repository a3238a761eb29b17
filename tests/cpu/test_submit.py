"""`launch submit`, `status` and `cancel` as far as they need no Slurm: what is refused, what is copied, what would be asked of sbatch."""

import io
import json
import shlex
import shutil
from contextlib import redirect_stderr, redirect_stdout

import pytest

from hybrid_megatron.errors import ConfigError
from hybrid_megatron.slurm.snapshot import snapshot
from hybrid_megatron.slurm.template import gpus_of
from launch import cancel, status, submit
from tests.cpu.runs import CHECKOUT, Ended
from tests.cpu.tiny import tiny_words


def called(command, *words) -> Ended:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            command.main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
    return Ended(code or 0, out.getvalue(), err.getvalue())


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch, tmp_path):
    """Slurm's commands are not there, and neither is a file of settings."""
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "git"):
        if found := shutil.which(tool):
            (tmp_path / "bin" / tool).symlink_to(found)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HYBRID_MEGATRON_CLUSTER", str(tmp_path / "none.env"))


def dry_run(*words) -> Ended:
    return called(submit, *words, "--dry-run", "--", "--gres=gpu:1", "--time=2")


def test_dry_run_says_what_would_be_asked_and_writes_nothing(tiny_data, tmp_path):
    run = tmp_path / "run"
    ended = dry_run(*tiny_words(tiny_data, f"run_dir={run}"))
    assert ended.code == 0 and not ended.err and not run.exists()
    (asked,) = [line for line in ended.out.splitlines() if line.startswith("would ask")]
    words = shlex.split(asked.removeprefix("would ask"))
    assert words[:2] == ["sbatch", "--parsable"] and words[-4:-2] == ["--gres=gpu:1", "--time=2"]
    assert (
        words[-2].startswith(f"{run}/code/") and words[-2].endswith("/slurm/train_8xh200.sbatch") and words[-1] == f"{run}/submitted.yaml"
    )
    assert "20 steps on 1 GPUs" in ended.out


def test_a_chain_waits_for_completion_and_starts_from_the_stage_before(tiny_data, tmp_path):
    first, second = tmp_path / "short", tmp_path / "long"
    ended = dry_run(*tiny_words(tiny_data, f"run_dir={first}"), "--then", *tiny_words(tiny_data, f"run_dir={second}"))
    assert ended.code == 0 and not ended.err
    asked = [line for line in ended.out.splitlines() if line.startswith("would ask")]
    assert "--dependency" not in asked[0]
    assert "--dependency=afterok:ID --kill-on-invalid-dep=yes" in asked[1]


@pytest.mark.parametrize(
    "words, said",
    [
        (["train.batch_tokens=100"], "train.batch_tokens=100"),
        (["data.train=/nowhere/train", "--", "--gres=gpu:1"], "/nowhere/train"),
        (["--gpus", "12"], "--gpus 12: there are templates for 8 and 16"),
        (["--gpus=8", "--template=x"], "--gpus and --template: both name the batch script"),
        (["--template", "/nowhere/x.sbatch"], "--template /nowhere/x.sbatch: cannot be read"),
        (["--when"], "submit has no option --when"),
        (["--then", "{same}"], "two stages of this chain have it"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(tiny_data, tmp_path, words, said):
    run = tmp_path / "run"
    recipe = tiny_words(tiny_data, f"run_dir={run}")
    words = [each for word in words for each in (recipe if word == "{same}" else [word])]
    ended = called(submit, *recipe, *words)
    assert ended.code == 2 and said in ended.errors[0] and not run.exists()


def test_without_slurm_one_sentence(tiny_data, tmp_path):
    ended = called(submit, *tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}"), "--", "--gres=gpu:1")
    assert ended.code == 2 and ended.errors[-1].startswith("sbatch: not found; this is for a node")


@pytest.mark.parametrize("command", [status, cancel])
def test_folders_that_are_none(command, tmp_path):
    assert "no such folder" in called(command, tmp_path / "none").errors[0]
    assert called(command, tmp_path, tmp_path).code == 2


def test_status_without_a_job(tmp_path):
    ended = called(status, tmp_path, "--json")
    facts = json.loads(ended.out)
    assert ended.code == 0 and facts["jobs"] == [] and facts["step"] == 0 and facts["checkpoint"] is None
    assert "none was submitted" in called(status, tmp_path).out


def test_status_reads_what_training_writes(tmp_path):
    run = tmp_path / "run"
    (run / "logs/job_7").mkdir(parents=True)
    (run / "checkpoints/step_00000020").mkdir(parents=True)
    lines = [{"step": i + 1, "tokens": 512 * (i + 1), "loss": 5.0 - i / 10, "step_seconds": 2.0} for i in range(30)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 31, "tok')
    (run / "events.jsonl").write_text(json.dumps({"time": "T", "event": "saved", "step": 20}) + "\n")
    (run / "jobs.jsonl").write_text(json.dumps({"id": "7", "time": "T"}) + '\n{"id": "8"')
    (run / "logs/job_7/attempts").write_text("T from nothing: crashed\nT from step_00000020: ")
    facts = json.loads(called(status, run, "--json").out)
    assert (facts["step"], facts["tokens"], facts["checkpoint"], facts["tokens_per_second"]) == (30, 15360, "step_00000020", 256)
    assert [job["id"] for job in facts["jobs"]] == ["7"] and len(facts["jobs"][0]["attempts"]) == 2
    assert facts["slurm"].startswith("squeue: not found"), "and yet the rest is told"
    told = called(status, run).out
    assert "loss       2.1000" in told and "T saved: step 20" in told and "T from nothing: crashed" in told


def test_snapshot_is_named_by_its_contents_and_never_changes(tmp_path):
    project = tmp_path / "project"
    for name in ("launch/train.py", "slurm/job.sh"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(name)
    first = snapshot({}, project)
    folder = first.write(tmp_path / "run")
    assert folder == tmp_path / "run/code" / first.hash and (folder / "launch/train.py").read_text() == "launch/train.py"
    assert snapshot({}, project).hash == first.hash
    (project / "launch/train.py").write_text("changed")
    second = snapshot({}, project)
    assert second.hash != first.hash and second.write(tmp_path / "run") != folder
    assert (folder / "launch/train.py").read_text() == "launch/train.py"


def test_a_job_finds_all_it_needs_in_a_snapshot():
    files = snapshot({}).files
    for name in (
        "slurm/job.sh",
        "slurm/node.sh",
        "slurm/env.sh",
        "launch/train.py",
        "hybrid_megatron/training/loop.py",
        "recipes/base.yaml",
    ):
        assert files[name] == CHECKOUT / name


@pytest.mark.parametrize(
    "options, gpus",
    [
        ([], 16),
        (["--nodes=1"], 8),
        (["-N", "4"], 32),
        (["-N1", "--gres=gpu:h200:4"], 4),
        (["--gpus-per-node=h200:2"], 4),
        (["--gpus-per-node", "2", "-N3"], 6),
    ],
)
def test_gpus_of_a_job(options, gpus):
    assert gpus_of(CHECKOUT / "slurm/train_16xh200.sbatch", options) == gpus


def test_gpus_of_a_job_that_does_not_say(tmp_path):
    script = tmp_path / "mine.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=1\n")
    with pytest.raises(ConfigError, match="do not say how many GPUs"):
        gpus_of(script, [])
