"""Whatever happens to a job, its run ends where an undisturbed one does: each step once, with bitwise the same losses, under one run id."""

import os
import signal

import pytest

from tests.slurm.cluster import wait_until
from tests.slurm.jobs import STEPS


def test_time_limit(training, undisturbed):
    """Submitted with a plain sbatch; five minutes before its time limit it is requeued, with a checkpoint of its last step."""
    run = training()
    run.submit()
    run.wait_for_steps(15)
    run_id = (run.run / "RUN_ID").read_text()
    run.cluster.run("scancel", "--batch", "--signal=USR1", run.job)  # as --signal=B:USR1 does
    run.end()
    stopped = run.events("stopped")
    assert [event["signal"] for event in stopped] == ["SIGUSR1"]
    assert run.restarts() == 1
    assert run.attempts() == ["from nothing: stopped SIGUSR1", f"from step_{stopped[0]['step']:08d}: complete"], "nothing was lost"
    run.check_complete(undisturbed(1))
    assert (run.run / "RUN_ID").read_text() == run_id


@pytest.mark.slow
def test_time_limit_of_slurm_itself(training, undisturbed):
    """The signal comes by itself, and when it has been missed the limit strikes."""
    run = training("train.tokens=40_960_000")
    run.submit("--time=1", "--signal=B:USR1@20")
    wait_until(lambda: run.restarts() == 1, "the job is requeued", 180, lambda: run.log)
    assert [event["signal"] for event in run.events("stopped")] == ["SIGUSR1"]


def test_preempted(training, undisturbed):
    run = training()
    run.submit("--nodes=1", "--nodelist=node1")
    run.wait_for_steps(15)
    urgent = run.cluster.sbatch("--partition=urgent", "--exclusive", "--nodelist=node1", "--output=/dev/null", "--wrap=sleep 3")
    run.cluster.wait_for_state(urgent, "COMPLETED")
    run.end()
    assert run.restarts() == 1 and [event["signal"] for event in run.events("stopped")] == ["SIGTERM"]
    assert "ended by Slurm" in run.attempts()[0]
    run.check_complete(undisturbed(1))


@pytest.mark.slow
@pytest.mark.parametrize("in_save", [False, True])
def test_node_killed(training, undisturbed, in_save):
    run = training(nodes=2)
    run.submit()
    run.wait_for_steps(25)
    if in_save:
        wait_until(lambda: any((run.run / "checkpoints").glob("step_*.partial")), "a save has begun")
    nodes = run.cluster.run("scontrol", "show", "hostnames", run.cluster.job(run.job)["NodeList"]).stdout.split()
    run.cluster.power_off(nodes[1])
    run.end()
    assert run.restarts() == 1 and nodes[1] not in run.cluster.job(run.job)["NodeList"]
    assert run.attempts()[0].endswith("lost with its node, or killed")
    run.check_complete(undisturbed(2))


def test_rank_killed(training, undisturbed):
    run = training(nodes=2)
    run.submit()
    run.wait_for_steps(25)
    (worker,) = run.cluster.processes(run.job, rank=1)
    os.kill(worker, signal.SIGKILL)
    run.end()
    assert run.restarts() == 0, "started again within its allocation"
    assert [attempt.partition(": ")[2] for attempt in run.attempts()] == ["crashed", "complete"]
    run.check_complete(undisturbed(2))


@pytest.mark.slow
def test_cancelled(training, undisturbed):
    run = training()
    run.submit()
    run.wait_for_steps(15)
    assert "saves at the end of its step" in run.launch("cancel", run.run).stdout
    run.end("FAILED")
    assert run.events("stopped")[0]["signal"] == "SIGTERM" and run.restarts() == 0
    assert run.attempts() == ["from step_00000010: cancelled, stopped SIGTERM"] or "cancelled" in run.attempts()[0]
    assert "nothing" in run.launch("cancel", run.run).stdout
    run.submit()
    run.end()
    run.check_complete(undisturbed(1))


def test_scancel(training):
    run = training()
    run.submit()
    run.wait_for_steps(15)
    run.cluster.run("scancel", run.job)
    run.end("CANCELLED")
    stopped = run.events("stopped")
    assert [event["signal"] for event in stopped] == ["SIGTERM"] and run.restarts() == 0
    assert (run.run / f"checkpoints/step_{stopped[0]['step']:08d}").is_dir(), "KillWait sufficed for a checkpoint"


@pytest.mark.slow
def test_crashes_in_vain_end_with_a_message(training):
    run = training("checkpoint.interval_steps=1000")
    run.submit()
    for _ in range(3):
        run.wait_for_steps(1)
        for worker in run.cluster.processes(run.job):
            os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not run.cluster.processes(run.job), "its processes are gone")
        (run.run / "metrics.jsonl").unlink()
    run.end("FAILED")
    assert run.attempts() == ["from nothing: crashed"] * 3
    assert "error: given up: 3 starts in a row led to no newer checkpoint" in run.log


@pytest.mark.slow
def test_refused(training):
    run = training("train.batch_tokens=100")
    run.submit()
    run.end("FAILED")
    assert run.cluster.job(run.job)["ExitCode"] == "2:0" and run.restarts() == 0
    assert run.log.splitlines()[-1].startswith("error: train.batch_tokens=100")
    assert len(run.attempts()) == 1 and STEPS
