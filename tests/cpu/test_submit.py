"""`launch submit`, `status` and `cancel` as far as they need no Slurm: what is refused, what is copied, what would be asked of sbatch."""

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from hybrid_megatron.command_line import interpreter, pasted
from hybrid_megatron.errors import ConfigError
from hybrid_megatron.slurm.snapshot import snapshot
from hybrid_megatron.slurm.template import gpus_of
from launch import cancel, status, submit
from tests.cpu.fake_slurm import FakeSlurm
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
    """Slurm's commands are not there, and the file of settings is empty."""
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "git", "cat", "ls", "grep"):
        if found := shutil.which(tool):
            (tmp_path / "bin" / tool).symlink_to(found)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "cluster.env").touch()
    monkeypatch.setenv("HYBRID_MEGATRON_CLUSTER", str(tmp_path / "cluster.env"))


@pytest.fixture
def slurm(tmp_path) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm", tmp_path / "bin")


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
    assert "20 steps on 1 GPU (" in ended.out and "micro-batch 2" in ended.out and "estimated at less than a minute on H200s" in ended.out


def test_a_chain_waits_for_completion_and_starts_from_the_stage_before(tiny_data, tmp_path):
    first, second = tmp_path / "short", tmp_path / "long"
    ended = dry_run(*tiny_words(tiny_data, f"run_dir={first}"), "--then", *tiny_words(tiny_data, f"run_dir={second}"))
    assert ended.code == 0 and not ended.err
    asked = [line for line in ended.out.splitlines() if line.startswith("would ask")]
    assert "--dependency" not in asked[0]
    assert "--dependency=afterok:ID --kill-on-invalid-dep=yes" in asked[1]


def test_stages_that_do_not_fit_each_other(tiny_data, tmp_path, slurm):
    first, second = tmp_path / "short", tmp_path / "long"
    recipe = tiny_words(tiny_data, f"run_dir={first}")
    chain = [*recipe, "--then", *recipe, f"run_dir={second}"]
    ended = called(submit, *chain, "model.ffn_size=64", "--", "--gres=gpu:1")
    [said] = ended.errors
    assert ended.code == 2 and not slurm.asked and not first.exists()
    assert said == (
        f"stage 2, {recipe[0]}: init_from={first}: the stage before holds decoder.layers.0.mlp.linear_fc1.weight as "
        "[96, 32], and this model has it as [128, 32]; give both stages the same model"
    )
    ended = called(submit, *chain, "model.attention.rope_base=500000", "--", "--gres=gpu:1")
    assert ended.code == 0 and len(slurm.asked) == 2


def test_a_stage_behind_a_job_that_runs(tiny_data, tmp_path, slurm):
    """Its checkpoint is still to come, so it is compared with what was submitted."""
    first, second = tmp_path / "short", tmp_path / "long"
    assert called(submit, *tiny_words(tiny_data, f"run_dir={first}"), "--", "--gres=gpu:1").code == 0
    words = tiny_words(tiny_data, f"run_dir={second}", f"init_from={first}")
    assert "neither a complete checkpoint nor a run folder with one" in called(submit, *words, "--", "--gres=gpu:1").errors[0]
    behind = ("--", "--gres=gpu:1", "--dependency=afterok:100")
    assert "give both stages the same model" in called(submit, *words, "model.ffn_size=64", *behind).errors[0]
    assert called(submit, *words, *behind).code == 0


def test_a_chain_of_which_the_second_is_refused(tiny_data, tmp_path, slurm):
    """What is said goes on: the rest of the chain, behind what is submitted."""
    folders = [tmp_path / name for name in ("a", "b with a space", "c")]
    chain = [word for folder in folders for word in ("--then", *tiny_words(tiny_data, f"run_dir={folder}"))][1:]
    slurm.refuse(2)
    ended = called(submit, *chain, "--", "--gres=gpu:1", "--dependency=singleton")
    [said] = ended.errors
    assert ended.code == 2 and said.startswith(
        f"stage 2, {chain[0]}: sbatch: Batch job submission failed: Invalid partition name specified; of this chain job 100 is"
    )
    assert f"{pasted('launch', 'cancel', folders[0])}, or" in said
    words = shlex.split(said.rpartition("go on with ")[2])
    assert words[:4] == [*shlex.split(interpreter()), "-m", "launch", "submit"]
    slurm.refuse(9)
    again = called(submit, *words[4:])
    assert again.code == 0 and not again.err
    dependencies = [[word for word in asked if word.startswith("--dependency")][-1] for asked in slurm.asked]
    assert dependencies == [f"--dependency={how}" for how in ("singleton", "afterok:100", "afterok:100", "afterok:102")]


@pytest.mark.parametrize("said, id", [("Submitted batch job 4242", "4242"), ("a banner\n4242;h200", "4242"), ("4242", "4242")])
def test_the_job_id_in_what_sbatch_says(tiny_data, tmp_path, slurm, said, id):
    (tmp_path / "bin/sbatch").write_text(f"#!/bin/bash\nprintf '%s\\n' '{said}'\n")
    ended = called(submit, *tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}"), "--", "--gres=gpu:1")
    assert ended.code == 0 and f"submitted  job {id}\n" in ended.out
    assert json.loads((tmp_path / "run/jobs.jsonl").read_text())["id"] == id


def test_no_job_id(tiny_data, tmp_path, slurm):
    """There may be a job, so its code stays."""
    (tmp_path / "bin/sbatch").write_text("#!/bin/bash\necho welcome\n")
    ended = called(submit, *tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}"), "--", "--gres=gpu:1")
    assert ended.code == 2 and ended.errors[0].startswith("sbatch: it gave no job id but 'welcome', so")
    assert (tmp_path / "run/submitted.yaml").is_file()


def test_what_sbatch_refuses_leaves_nothing(tiny_data, tmp_path, slurm):
    run = tmp_path / "run"
    slurm.refuse(1)
    assert "Invalid partition" in called(submit, *tiny_words(tiny_data, f"run_dir={run}"), "--", "--gres=gpu:1").errors[0]
    assert not run.exists()


def test_what_sbatch_refuses_leaves_an_earlier_jobs_folder(tiny_data, tmp_path, slurm):
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}")
    slurm.refuse(2)
    assert called(submit, *words, "--", "--gres=gpu:1").code == 0
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    ended = called(submit, *words, "tracking.wandb=disabled", "--", "--gres=gpu:1")
    assert ended.code == 2 and "Invalid partition" in ended.errors[0]
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before and (run / "logs").is_dir()


@pytest.mark.parametrize("really", [[], ["--dry-run"]])
def test_a_folder_that_is_taken(tiny_data, tmp_path, slurm, really):
    run = tmp_path / "my run"
    words = tiny_words(tiny_data, f"run_dir={run}")
    assert called(submit, *words, "--", "--gres=gpu:1").code == 0
    slurm.jobs(("100", "PENDING"))
    [said] = called(submit, *words, *really, "--", "--gres=gpu:1").errors
    assert f"there is already job 100 (pending) for this run folder; wait for it, end it with {pasted('launch', 'cancel', run)}, or" in said
    slurm.jobs()
    (run / "checkpoints/step_00000010").mkdir(parents=True)
    shutil.copy(run / "submitted.yaml", run / "config.yaml")
    ended = called(submit, *words, "optimizer.peak_lr=1", *really, "--", "--gres=gpu:1")
    assert ended.code == 2 and "optimizer.peak_lr: this run has 0.003, the recipe now says 1.0" in ended.errors[0]
    assert len(slurm.asked) == 1


def test_what_is_printed_can_be_pasted(tiny_data, tmp_path, slurm):
    run = tmp_path / "100% of $it"
    words = tiny_words(tiny_data, f"run_dir={run}")
    would = next(line for line in dry_run(*words).out.splitlines() if line.startswith("would ask"))
    ended = called(submit, *words, "--", "--gres=gpu:1", "--time=2")
    assert shlex.split(would.removeprefix("would ask")) == ["sbatch", *slurm.asked[0]]
    assert f"--output={tmp_path}/100%% of $it/logs/slurm-%j.out" in slurm.asked[0]
    lines = {line.split()[0]: shlex.split(line)[1:] for line in ended.out.splitlines() if line.startswith(("watch", "end"))}
    assert Path(lines["watch"][0]).absolute() == Path(sys.executable) and lines["watch"][1:] == ["-m", "launch", "status", str(run)]
    assert lines["end"][1:] == ["-m", "launch", "cancel", str(run)]
    assert called(status, *lines["watch"][4:]).code == 0


def test_the_interpreter_within_the_folder_is_short(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv/bin/python"))
    assert interpreter() == f"{tmp_path}/.venv/bin/python"
    monkeypatch.chdir(tmp_path)
    assert pasted("launch", "status", "a b") == ".venv/bin/python -m launch status 'a b'"


def test_cancel_twice(tiny_data, tmp_path, slurm):
    run = tmp_path / "run"
    assert called(submit, *tiny_words(tiny_data, f"run_dir={run}"), "--", "--gres=gpu:1").code == 0
    slurm.jobs(("100", "RUNNING"))
    first, second = (called(cancel, run).out for _ in range(2))
    assert "job 100 (running): it saves at the end of its step and ends" in first
    assert "job 100 (running): was asked at 2" in second and "and now again: it saves" in second
    assert slurm.cancelled == 2 * ["--batch --signal=USR2 100"]
    assert (run / "jobs.jsonl").read_text().count("cancelled") == 1, "the first ask alone is noted"
    assert "to save and end" in called(status, run).out
    slurm.jobs(("100", "CANCELLED"))
    assert "job        100: cancelled" in called(status, run).out
    assert json.loads(called(status, run, "--json").out)["jobs"][0]["cancelled"].startswith("2")
    assert "nothing" in called(cancel, run).out


def test_a_job_that_the_signal_alone_cancelled(tmp_path, slurm):
    (tmp_path / "logs/job_7").mkdir(parents=True)
    (tmp_path / "jobs.jsonl").write_text('{"id": "7", "time": "T"}\n')
    slurm.jobs(("7", "RUNNING"))
    assert "to save and end" not in called(status, tmp_path).out
    (tmp_path / "logs/job_7/cancelled").touch()
    assert "to save and end" in called(status, tmp_path).out
    slurm.jobs(("7", "FAILED"))
    assert "job        7: failed" in called(status, tmp_path).out, "the script has Slurm call a cancelled job so; this one was refused"


@pytest.mark.parametrize("words", [["plan", "776m+rope+pretrain_4k", "data.train=x"], ["status", "{run}"], ["nothing"]])
def test_whoever_reads_may_leave(tmp_path, words):
    """No traceback where what is printed goes to a pipe that nobody reads, and the usual exit code of that."""
    (tmp_path / "config.yaml").touch()
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "launch", *(word.replace("{run}", str(tmp_path)) for word in words)]
    with open(writer, "w") as out:
        ended = subprocess.run(command, cwd=CHECKOUT, stdout=out, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, "Traceback" in ended.stderr, "Broken" in ended.stderr) == (2 if words == ["nothing"] else 141, False, False)


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
        (["--then"], "--then: a recipe must stand before it and behind it"),
        (["--then", "--", "--gres=gpu:1"], "--then: a recipe must stand before it and behind it"),
        (["init_from=/nowhere/run", "--", "--gres=gpu:1"], "init_from=/nowhere/run: does not exist; give a run folder or one of its"),
        (["run_dir=/dev/null/run", "--dry-run", "--", "--gres=gpu:1"], "run_dir=/dev/null/run: cannot write there (Not a directory)"),
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
    ended = called(command, tmp_path)
    assert ended.code == 2 and "no run was submitted or has begun in this folder" in ended.errors[0] and not ended.out
    assert called(command, tmp_path, tmp_path).code == 2


def test_status_without_a_job(tmp_path):
    (tmp_path / "config.yaml").touch()
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


@pytest.mark.parametrize("words", [["-G", "4"], ["-G4"], ["-Gh200:4"], ["--gpus=4"], ["--gpus", "4"], ["--gpus-per-task=1"]])
def test_gpus_that_are_not_asked_for_by_node(tiny_data, tmp_path, slurm, words):
    ended = called(submit, *tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}"), "--", *words)
    [said] = ended.errors
    assert ended.code == 2 and not slurm.asked
    name = "--gpus-per-task" if "task" in words[0] else "--gpus"
    assert said.startswith(f"{name}=") and "by node" in said and "--gres=gpu:N or --gpus-per-node=N instead" in said


def test_gpus_that_a_script_or_a_variable_asks_for(tmp_path):
    script = tmp_path / "mine.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --gpus 16\n")
    with pytest.raises(ConfigError, match=f"{script}: #SBATCH --gpus=16: a job's GPUs are asked for by node"):
        gpus_of(script, ["--gres=gpu:8"])
    project = CHECKOUT / "slurm/train_16xh200.sbatch"
    assert gpus_of(project, [], {"SBATCH_GRES": "gpu:4"}) == 8
    assert gpus_of(project, ["--gres=gpu:2"], {"SBATCH_GRES": "gpu:4"}) == 4
    assert gpus_of(project, [], {"SBATCH_GPUS_PER_NODE": "h200:1"}) == 2
    with pytest.raises(ConfigError, match="variable SBATCH_\\*: --gpus=4"):
        gpus_of(project, [], {"SBATCH_GPUS": "4"})


def test_the_plan_is_on_the_gpus_of_cluster_env(tiny_data, tmp_path):
    (tmp_path / "cluster.env").write_text("SBATCH_GRES=gpu:1\n")
    ended = called(submit, *tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}"), "--dry-run")
    assert ended.code == 0 and "20 steps on 1 GPU (" in ended.out
