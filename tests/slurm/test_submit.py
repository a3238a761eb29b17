"""`launch submit`, `status` and `cancel` against a cluster."""

import json
from pathlib import Path

import pytest

from hybrid_megatron.config import load_recipe
from hybrid_megatron.data import build_index_caches
from tests.cpu.runs import CHECKOUT, checkpoints, computed
from tests.slurm.cluster import wait_until
from tests.slurm.jobs import STEPS

SMALL = ("--", "--gres=gpu:1")

pytestmark = pytest.mark.slow


def submitted(said: str) -> list[str]:
    """The ids of jobs that `launch submit` printed."""
    return [line.split()[2].rstrip(",") for line in said.splitlines() if line.startswith("submitted")]


def test_submit(training, undisturbed):
    """A job and its requeues run from what was submitted, whatever happens to the recipe's file later."""
    run = training()
    recipe = Path(run.words[0])
    copy = run.folder / "mine.yaml"
    copy.write_text(recipe.read_text())
    ended = run.launch("submit", copy, *run.words[1:], *SMALL)
    (run.job,) = submitted(ended.stdout)
    copy.write_text("train: {tokens: 1}")
    again = run.launch("submit", recipe, *run.words[1:], *SMALL, check=False)
    assert again.returncode == 2 and f"there is already job {run.job}" in again.stderr, "two jobs never share a folder"

    log = run.run / f"logs/slurm-{run.job}.out"
    wait_until(lambda: run.steps >= 15, "step 15", 300, lambda: log.read_text() if log.exists() else "")
    facts = json.loads(run.launch("status", run.run, "--json").stdout)
    assert facts["jobs"][0]["state"] == "RUNNING" and facts["steps"] == STEPS and facts["step"] >= 15
    assert f"job        {run.job}: running for" in run.launch("status", run.run).stdout
    run.cluster.run("scancel", "--batch", "--signal=USR1", run.job)
    run.end()
    assert run.restarts() == 1 and len(run.attempts()) == 2
    run.check_complete(undisturbed(1))
    code = json.loads((run.run / "jobs.jsonl").read_text().splitlines()[0])["code"]
    assert (run.run / f"code/{code}/slurm/job.sh").read_bytes() == (CHECKOUT / "slurm/job.sh").read_bytes()
    told = run.launch("status", run.run).stdout
    assert f"job        {run.job}: completed; training: complete" in told and f"step       {STEPS} of {STEPS}" in told
    assert "nothing to submit" in run.launch("submit", recipe, *run.words[1:], *SMALL).stdout


def test_a_chain_of_stages(training, undisturbed):
    """The second starts when the first is complete, from its parameters, in a folder and a wandb run of its own."""
    run = training()
    second = run.folder / "the second, 100%jobs"  # a % begins what sbatch replaces
    words = [*run.words, f"run_dir={second}", "train.context=128", "train.tokens=5120", f"data.cache_dir={run.folder}"]
    build_index_caches(load_recipe([*words, f"init_from={run.run}"]))
    ended = run.launch("submit", *run.words, "--then", *words, *SMALL)
    run.job, after = submitted(ended.stdout)
    assert f"after job {run.job} is complete" in ended.stdout
    run.wait_for_steps(15)
    run.cluster.run("scancel", "--batch", "--signal=USR1", run.job)
    run.wait_until(lambda: len(run.events("start")) == 2, "the first stage is requeued and goes on")
    assert run.cluster.state(after) == "PENDING", "a requeue is no completion"
    run.end()
    run.check_complete(undisturbed(1))
    first_id = (run.run / "RUN_ID").read_text()
    run.job = after
    run.end()
    assert "complete" in (second / f"logs/slurm-{after}.out").read_text()
    assert len(computed(second)) == 10 and checkpoints(second)[-1] == "step_00000010"
    (origin,) = [json.loads(line) for line in (second / "events.jsonl").read_text().splitlines() if "init_from" in line]
    assert origin["step"] == STEPS and origin["checkpoint"].startswith(str(run.run))
    assert (second / "RUN_ID").read_text() != first_id


def test_a_chain_ends_with_its_first_stage(training):
    run = training()
    ended = run.launch("submit", *run.words, "--then", *run.words, f"run_dir={run.folder / 'second'}", *SMALL)
    run.job, after = submitted(ended.stdout)
    run.wait_for_steps(15)
    run.launch("cancel", run.run)
    run.end("CANCELLED")
    assert f"job        {run.job}: cancelled; training: stopped" in run.launch("status", run.run).stdout
    run.cluster.wait_for_state(after, "CANCELLED", seconds=30)
    assert "nothing" in run.launch("cancel", run.folder / "second").stdout


def test_two_jobs_in_one_folder(training):
    """Plain sbatch knows of no folders: the second job is refused by the first one's lock, and the first is not disturbed."""
    run = training("train.tokens=40_960_000")
    first = run.submit("--nodelist=node1")
    run.wait_for_steps(5)
    second = run.submit("--nodelist=node2")
    run.end("FAILED")
    refusal = run.log.splitlines()[-1]
    assert "another process is training in this folder" in refusal and f"job {first}" in refusal
    assert run.cluster.job(second)["ExitCode"] == "2:0" and run.cluster.state(first) == "RUNNING"
    run.launch("cancel", run.run)
    run.job = first
    run.end("CANCELLED")
    assert len(computed(run.run)) == run.events("stopped")[0]["step"] and len(run.events("start")) == 1
    assert [entry["id"] for entry in json.loads(run.launch("status", run.run, "--json").stdout)["jobs"]] == [first, second]


def test_sbatch_refuses(training):
    """Its reason is told once."""
    run = training()
    ended = run.launch("submit", *run.words, "--", "--gres=gpu:1", "--partition=nowhere", check=False)
    assert ended.returncode == 2 and ended.stderr.startswith("error: sbatch: Batch job submission failed: Invalid partition")
