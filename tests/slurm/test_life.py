"""Whatever happens to a job, its run ends where an undisturbed one does: each step once, with bitwise the same losses, in one wandb run."""

import signal
import sys
import time
from pathlib import Path

import pytest

from hybrid_megatron.checkpoint.store import read_progress
from tests.slurm.cluster import wait_until


def test_time_limit(training, undisturbed):
    """Submitted with a plain sbatch; when Slurm says that its time limit is near, it saves its last step and is requeued."""
    run = training()
    run.submit()
    run.wait_for_steps(15)
    run.cluster.run("scancel", "--batch", "--signal=USR1", run.job)  # as --signal=B:USR1@300 does
    expected = undisturbed(1)  # while the job is requeued
    run.end()
    stopped = run.events("stopped")
    assert [event["signal"] for event in stopped] == ["SIGUSR1"]
    assert run.restarts() == 1
    assert run.attempts() == ["from nothing: stopped SIGUSR1", f"from step_{stopped[0]['step']:08d}: complete"], "nothing was lost"
    run.check_complete(expected)


@pytest.mark.slow
def test_time_limit_of_slurm_itself(training):
    """The signal comes without anybody's doing."""
    run = training("train.tokens=40_960_000")
    run.submit("--time=2", "--signal=B:USR1@60")
    run.wait_until(lambda: run.restarts() == 1, "the job is requeued", 200)
    assert [event["signal"] for event in run.events("stopped")] == ["SIGUSR1"]


@pytest.mark.slow
def test_time_limit_strikes_unannounced(training):
    """As where a step takes longer than the time after the signal: what Slurm leaves until it kills may do, and the job is requeued."""
    run = training("train.tokens=40_960_000")
    run.submit("--time=1", "--signal=B:URG@1")
    run.wait_until(lambda: run.restarts() == 1, "the job is requeued", 200)
    run.wait_until(lambda: len(run.events("start")) == 2, "it is started again", 200)
    assert run.attempts()[0] == "from nothing: reached its time limit"
    assert run.events("stopped")[0]["step"] == run.events("start")[1]["step"]


@pytest.mark.slow
def test_preempted(training, undisturbed):
    run = training()
    run.submit("--nodelist=node1")
    run.wait_for_steps(15)
    urgent = run.cluster.sbatch("--partition=urgent", "--exclusive", "--nodelist=node1", "--output=/dev/null", "--wrap=sleep 3")
    run.cluster.wait_for_state(urgent, "COMPLETED")
    run.end()
    stopped = run.events("stopped")
    assert run.restarts() == 1 and [event["signal"] for event in stopped] == ["SIGTERM"]
    assert run.attempts() == ["from nothing: ended by Slurm, which requeued it", f"from step_{stopped[0]['step']:08d}: complete"]
    run.check_complete(undisturbed(1))


@pytest.mark.slow
def test_node_killed_in_a_step(training, undisturbed):
    run = training(nodes=2)
    run.submit()
    run.wait_for_steps(25)
    dead = run.node_of(rank=1)
    run.cluster.power_off(dead)
    run.end()
    assert run.restarts() == 1 and dead not in run.cluster.job(run.job)["NodeList"]
    assert run.attempts()[0].endswith(f"ended by Slurm: node {dead} was lost"), "the batch script was on the other node"
    run.check_complete(undisturbed(2))


@pytest.mark.slow
def test_node_of_rank_0_killed(training, undisturbed):
    """The batch script dies with it, and the run folder is held by a process of which nobody can tell whether it lives."""
    run = training()
    run.submit()
    run.wait_for_steps(25)
    dead = run.node_of(rank=0)
    run.cluster.power_off(dead)
    run.end()
    assert run.restarts() == 1 and dead != run.cluster.job(run.job)["NodeList"]
    assert run.attempts()[0].endswith(f": node {dead} was lost")
    assert "waiting    for the run folder" in run.log
    run.check_complete(undisturbed(1))


@pytest.mark.slow
def test_node_killed_in_a_save(training, undisturbed):
    run = training("checkpoint.interval_steps=4", nodes=2)
    run.submit()
    run.wait_for_steps(9)
    partial = _stop_in_a_save(run)
    run.cluster.power_off(run.node_of(rank=1))
    assert partial.is_dir()
    run.end()
    assert run.restarts() == 1 and not partial.is_dir()
    run.check_complete(undisturbed(2))


def _stop_in_a_save(run) -> Path:
    """Stop rank 1 while it writes a checkpoint, which is then incomplete and stays so."""
    folder = run.run / "checkpoints"
    while True:
        run.wait_until(lambda: any(folder.glob("step_*[0-9].partial")), "a save has begun", 120)
        run.signal(1, signal.SIGSTOP)
        time.sleep(1)
        if partial := next(folder.glob("step_*[0-9].partial"), None):
            return partial
        run.signal(1, signal.SIGCONT)  # the save was done by then


@pytest.mark.slow
def test_rank_killed(training, undisturbed):
    run = training(nodes=2)
    run.submit()
    run.wait_for_steps(25)
    run.signal(1, signal.SIGKILL)
    run.end()
    assert run.restarts() == 0, "started again within its allocation"
    assert [attempt.partition(": ")[2] for attempt in run.attempts()] == ["crashed", "complete"]
    run.check_complete(undisturbed(2))


@pytest.mark.slow
def test_hang(training, undisturbed):
    """One process stands still: the other says which, all end, and the run goes on."""
    run = training("watchdog.step_seconds=15", nodes=2)
    run.submit()
    run.wait_for_steps(25)
    run.signal(1, signal.SIGSTOP)
    run.end()
    assert run.restarts() == 0 and [attempt.partition(": ")[2] for attempt in run.attempts()] == ["crashed", "complete"]
    (hang,) = run.events("hang")
    (culprit,) = [line for line in hang["ranks"] if "the others wait for it" in line]
    assert culprit.startswith("rank 1 (node2, pid ")
    assert any((run.run / "logs/stacks").iterdir())
    run.check_complete(undisturbed(2))


@pytest.mark.slow
def test_damaged_checkpoint(training, undisturbed):
    run = training()
    run.submit()
    run.wait_for_steps(35)
    run.cluster.run("scancel", "--batch", "--signal=USR1", run.job)
    run.wait_until(lambda: run.restarts() == 1, "the job is requeued")
    newest = run.run / f"checkpoints/step_{run.events('stopped')[0]['step']:08d}"
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    with open(largest, "r+b") as file:
        file.seek(largest.stat().st_size // 2)
        file.write(b"damaged")
    run.end()
    assert newest.name in run.log and run.events("start")[-1]["step"] < int(newest.name[5:])
    run.check_complete(undisturbed(1))


@pytest.mark.slow
def test_full_disk(cluster, training, undisturbed):
    """One clear message and no requeue; with room again, the same submitted again goes on."""
    run = training(on_small_disk=True)
    run.submit()
    run.wait_for_steps(25)
    filler = cluster.seen(cluster.small_disk) / "filler"
    with open(filler, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
    run.end("FAILED")
    assert run.restarts() == 0
    assert "not saved" in run.log.splitlines()[-1] and "the disk has" in run.log.splitlines()[-1]
    assert run.cluster.job(run.job)["ExitCode"] == "2:0" and len(run.attempts()) == 1
    filler.unlink()
    run.go_on(undisturbed(1))


@pytest.mark.slow
def test_cancelled(training, undisturbed):
    run = training()
    run.submit()
    run.wait_for_steps(15)
    assert "saves at the end of its step" in run.launch("cancel", run.run).stdout
    run.end("CANCELLED")
    assert run.events("stopped")[0]["signal"] == "SIGTERM" and run.restarts() == 0
    assert run.attempts() == ["from nothing: cancelled, stopped SIGTERM"]
    assert "nothing" in run.launch("cancel", run.run).stdout
    run.go_on(undisturbed(1))


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--batch"], ["--full"]])
def test_interrupted(training, undisturbed, options):
    """scancel --signal=INT, whomever it is told: a permanent checkpoint and the end, on all nodes, and no requeue."""
    run = training(nodes=2)
    run.submit()
    run.wait_for_steps(15)
    run.cluster.run("scancel", "--signal=INT", *options, run.job)
    run.end("CANCELLED")
    (stopped,) = run.events("stopped")
    assert stopped["signal"] == "SIGINT" and run.restarts() == 0
    assert read_progress(run.run / f"checkpoints/step_{stopped['step']:08d}").form == "permanent"
    assert run.attempts() == ["from nothing: cancelled, stopped SIGINT"]
    run.go_on(undisturbed(2))


@pytest.mark.slow
def test_scancel(training, undisturbed):
    run = training()
    run.submit()
    run.wait_for_steps(15)
    run.cluster.run("scancel", run.job)
    run.end("CANCELLED")
    wait_until(lambda: not run.cluster.processes(run.job), "its processes are gone", 60)
    stopped = run.events("stopped")
    assert [event["signal"] for event in stopped] == ["SIGTERM"] and run.restarts() == 0
    assert (run.run / f"checkpoints/step_{stopped[0]['step']:08d}").is_dir(), "KillWait sufficed for a checkpoint"
    assert run.attempts() == ["from nothing: cancelled by scancel"]
    run.go_on(undisturbed(1))


@pytest.mark.slow
def test_crashes_in_vain_end_with_a_message(training):
    run = training("checkpoint.interval_steps=1000")
    run.submit()
    for start in range(3):
        run.wait_until(lambda start=start: len(run.attempts()) == start + 1 and run.cluster.processes(run.job), "it is started")
        run.signal(0, signal.SIGKILL)
        wait_until(lambda: not run.cluster.processes(run.job), "its process is gone")
    run.end("FAILED")
    assert run.attempts() == ["from nothing: crashed"] * 3 and run.restarts() == 0
    assert "error: given up: 3 starts in a row led to no newer checkpoint" in run.log.splitlines()[-1]


@pytest.mark.slow
def test_refused(training):
    run = training("train.batch_tokens=100")
    run.submit()
    run.end("FAILED")
    assert run.cluster.job(run.job)["ExitCode"] == "2:0" and run.restarts() == 0
    assert run.log.splitlines()[-1].startswith("error: train.batch_tokens=100")
    assert len(run.attempts()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("preflight", ["yes", "no"])
def test_gpus_that_torch_does_not_see(training, preflight):
    """The job has GPUs, and nobody said that the CPU is meant: it does not train there, slowly and in silence."""
    run = training(settings=["unset HYBRID_MEGATRON_ALLOW_CPU", f"PREFLIGHT={preflight}"])
    run.submit()
    run.end("FAILED")
    assert run.cluster.job(run.job)["ExitCode"] == "2:0" and run.restarts() == 0 and run.steps == 0
    last = run.log.splitlines()[-1]
    assert last.startswith("error: ") and "node1: Slurm gave it GPUs (SLURM_GPUS_ON_NODE=1) and torch sees none" in last, run.log


@pytest.mark.slow
def test_bad_node_is_left_out(training, undisturbed, tmp_path):
    """An examination finds node1 bad; the job goes on with others."""
    run = training(settings=[f"PYTHON={_finds_bad('node1', tmp_path)}", "PREFLIGHT=yes"])
    run.submit()
    run.end()
    assert run.restarts() == 1 and run.attempts() == ["from nothing: bad nodes: node1", "from nothing: complete"]
    assert run.cluster.job(run.job)["ExcNodeList"] == "node1" and run.cluster.job(run.job)["NodeList"] != "node1"
    run.check_complete(undisturbed(1))


def _finds_bad(node: str, folder: Path) -> Path:
    """A Python whose `launch preflight` finds this node bad and others good."""
    script = folder / "python"
    script.write_text(f"""#!/bin/bash
if [[ "$*" != *"-m launch preflight"* ]]; then
    exec {sys.executable} "$@"
elif [[ $SLURMD_NODENAME == {node} ]]; then
    echo {node} >"$HYBRID_MEGATRON_BAD_NODES"
    echo bad_nodes >"$HYBRID_MEGATRON_PREFLIGHT"
    exit 1
fi
echo ok >"$HYBRID_MEGATRON_PREFLIGHT"
""")
    script.chmod(0o755)
    return script


@pytest.mark.slow
def test_examined_before_it_starts(training, undisturbed):
    run = training(settings=["PREFLIGHT=yes"], nodes=2)
    run.submit()
    run.end()
    assert (run.run / f"logs/job_{run.job}/preflight").read_text().strip() == "ok", run.log
    run.check_complete(undisturbed(2))


@pytest.mark.slow
def test_examination_refuses(training):
    """What only the nodes can find out: one sentence, exit code 2, no requeue."""
    run = training("data.tokenizer=/nowhere/tokenizer.model", settings=["PREFLIGHT=yes"])
    run.submit()
    run.end("FAILED")
    assert run.cluster.job(run.job)["ExitCode"] == "2:0" and run.restarts() == 0 and len(run.attempts()) == 1
    assert run.log.splitlines()[-1].startswith("error: "), run.log
