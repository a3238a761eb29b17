"""`make slurm-rehearsal`: what a job lives through on a cluster, on this machine and in minutes.

Starts a cluster of three nodes, submits a recipe to two of them with a plain sbatch, powers one off, lets the time limit strike, and
compares every loss of the run that all of this happened to with a run that nothing disturbed. Leaves all in runs/slurm_rehearsal, and says
all the while what it does and how far it is.
"""

import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.cpu.runs import CHECKOUT, Process, computed
from tests.cpu.tiny import make_tiny_data, tiny_words
from tests.slurm.cluster import Cluster, why_not
from tests.slurm.jobs import Training, cluster_env

FOLDER = CHECKOUT / "runs/slurm_rehearsal"
SECONDS_OF_STEPS = 150
"""So long that the time limit strikes in it, which takes Slurm up to two minutes."""
PROGRESS_SECONDS = 20
BEGAN = time.monotonic()


def main() -> None:
    if reason := why_not():
        sys.exit(f"error: {reason}")
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    say(f"all of it in {FOLDER}; first a small dataset")
    data = make_tiny_data(FOLDER)
    say("how long a step takes here: 40 on two processes")
    words, steps = _budget(data)
    say(f"a run of {steps} steps on two processes that nothing disturbs, some {SECONDS_OF_STEPS} s and its start")
    with progress(FOLDER / "undisturbed", steps):
        _train(data, FOLDER / "undisturbed", words)
    say("a Slurm cluster of three nodes is started")
    folder = Path(tempfile.mkdtemp(prefix="slurm"))  # short: the paths of sockets are limited
    try:
        with Cluster(folder, nodes=3) as cluster:
            say(f"it is there: {cluster.run('sinfo', '--version').stdout.strip()}, nodes {', '.join(cluster.nodes)}")
            run = Training(cluster, data, FOLDER / "run", cluster_env(FOLDER), 2, words)
            with progress(FOLDER / "run", steps):
                _life(cluster, run, steps)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _compare(run, words)


def _life(cluster: Cluster, run: Training, steps: int) -> None:
    run.submit("--signal=B:USR1@60")
    say(f"sbatch slurm/train_16xh200.sbatch: job {run.job}, on two nodes; at step {steps // 8} one of them will be powered off")
    run.wait_for_steps(steps // 8, seconds=600)
    node = run.node_of(rank=1)
    cluster.power_off(node)
    say(f"step {run.steps}: {node} is powered off; Slurm notices within seconds, on a real cluster within minutes")
    run.wait_until(lambda: run.restarts() == 1, "the job is requeued")
    say("Slurm has noticed and requeued the job; processes start on two living nodes")
    run.wait_until(lambda: len(run.events("start")) == 2, "training goes on")
    say(f"training goes on at step {run.events('start')[1]['step']}, on {cluster.job(run.job)['NodeList']}; {node} is back")
    cluster.power_on(node)
    say(f"at step {steps // 4} its time limit will be shortened")
    run.wait_for_steps(steps // 4, seconds=600)
    hours, minutes, _ = map(int, cluster.job(run.job)["RunTime"].split(":"))
    cluster.run("scontrol", "update", f"JobId={run.job}", f"TimeLimit={60 * hours + minutes + 2}")
    say(f"step {run.steps}: its time limit is set to strike within two minutes")
    run.wait_until(lambda: run.events("stopped"), "the time limit is near", 200)
    stopped = run.events("stopped")[0]
    say(f"stopped by {stopped['signal']}, a minute before it, after step {stopped['step']} with a checkpoint")
    run.wait_until(lambda: run.restarts() == 2, "the job is requeued")
    cluster.run("scontrol", "update", f"JobId={run.job}", "TimeLimit=1-0")
    run.wait_until(lambda: len(run.events("start")) == 3, "training goes on")
    say(f"requeued, and training goes on at step {run.events('start')[2]['step']}")
    run.end(seconds=900)
    say(f"job {run.job} is complete")
    print("\n" + run.launch("status", run.run).stdout)


def _compare(run: Training, words: tuple[str, ...]) -> None:
    stitched, undisturbed = computed(run.run), computed(FOLDER / "undisturbed")
    starts = [event["step"] for event in run.events("start")]
    print("step    three starts   undisturbed")
    for line, other in list(zip(stitched, undisturbed))[:: max(len(stitched) // 12, 1)]:
        print(f"{line['step']:6}   {line['loss']:.8f}    {other['loss']:.8f}")
    plot = _plot(stitched, undisturbed, starts[1:])
    if stitched != undisturbed:
        sys.exit(f"error: the curves differ; {plot} shows where")
    print(
        f"equal      all {len(stitched)} steps once each, every metric bit for bit; starts at steps {', '.join(map(str, starts))}; {plot}"
    )


def _plot(stitched: list[dict], undisturbed: list[dict], starts: list[int]) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    for lines, label, style in (
        (undisturbed, "undisturbed", {"linewidth": 4, "alpha": 0.3}),
        (stitched, "three starts", {"linewidth": 0.8}),
    ):
        axes.plot([line["step"] for line in lines], [line["loss"] for line in lines], label=label, **style)
    for step in starts:
        axes.axvline(step, color="grey", linestyle=":")
    axes.set(xlabel="step", ylabel="training loss")
    axes.legend()
    figure.savefig(FOLDER / "rehearsal.png", dpi=120, bbox_inches="tight")
    return FOLDER / "rehearsal.png"


def _budget(data: Path) -> tuple[tuple[str, ...], int]:
    """Overrides for a run that takes SECONDS_OF_STEPS on this machine, found by a short one."""
    _train(data, FOLDER / "pace", ("train.tokens=20480",))
    lines = [json.loads(line) for line in (FOLDER / "pace/metrics.jsonl").read_text().splitlines()]
    pace = statistics.median(line["step_seconds"] for line in lines[5:])
    steps = min(max(round(SECONDS_OF_STEPS / pace, -2), 400), 10_000)
    words = (f"train.tokens={int(steps) * 512}", "checkpoint.interval_steps=50", f"validation.interval_steps={int(steps) // 4}")
    return words, int(steps)


def _train(data: Path, run: Path, words: tuple[str, ...]) -> None:
    ended = Process(tiny_words(data, *words, f"run_dir={run}"), 2).end(seconds=1200)
    if ended.code:
        sys.exit(f"error: the run without Slurm failed:\n{ended.err}")


@contextlib.contextmanager
def progress(run: Path, steps: int) -> Iterator[None]:
    """Says how far a run is, from time to time."""
    over = threading.Event()

    def tell() -> None:
        while not over.wait(PROGRESS_SECONDS):
            metrics = run / "metrics.jsonl"
            say(f"    step {metrics.read_text().count(chr(10)) if metrics.is_file() else 0} of {steps}")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def say(what: str) -> None:
    print(f"{time.monotonic() - BEGAN:5.0f} s   {what}", flush=True)


if __name__ == "__main__":
    main()
