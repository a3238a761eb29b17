"""A training as these tests submit it: through the batch scripts of slurm/ as they are, with options of sbatch that make it small."""

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from hybrid_megatron.training.wandb_files import recorded_steps
from launch import train
from tests.cpu.runs import CHECKOUT, Process, checkpoints, computed
from tests.cpu.tiny import tiny_words
from tests.slurm.cluster import Cluster, wait_until

STEPS = 80
WORDS = (
    f"train.tokens={STEPS * 512}", "checkpoint.interval_steps=10", "validation.interval_steps=40", "tracking.wandb=offline",
)  # fmt: skip
TEMPLATES = {1: "slurm/train_8xh200.sbatch", 2: "slurm/train_16xh200.sbatch"}
"""By their nodes."""
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def cluster_env(folder: Path, *more: str) -> Path:
    """A cluster.env for machines without GPUs: no examination of the nodes, unless `more` lines say so, which takes as long as a run."""
    file = folder / "cluster.env"
    usual = ("PREFLIGHT=no", "RETRY_SECONDS=0", "export OMP_NUM_THREADS=1", "export HYBRID_MEGATRON_ALLOW_CPU=yes")
    file.write_text("\n".join([f"PYTHON={sys.executable}", *usual, *more]) + "\n")
    return file


def undisturbed_metrics(data: Path, run: Path, processes: int, *overrides: str) -> list[dict]:
    """What a run on so many processes computes when nothing happens to it, without Slurm."""
    words = tiny_words(data, *WORDS, "tracking.wandb=disabled", *overrides, f"run_dir={run}")
    if processes == 1:  # in this process, which has torch imported
        with contextlib.redirect_stdout(io.StringIO()):
            train.main(words)
    else:
        ended = Process(words, processes).end(seconds=900)
        assert ended.code == 0, ended.err
    return computed(run)


class Training:
    """A recipe of STEPS steps on `nodes` nodes, one process on each; `run` is its folder as it is seen from here."""

    def __init__(self, cluster: Cluster, data: Path, run: Path, settings: Path, nodes: int, overrides: tuple[str, ...]):
        self.cluster, self.run, self.folder, self.nodes = cluster, run, settings.parent, nodes
        self.words = tiny_words(data, *WORDS, *overrides, f"run_dir={run}")
        self.environment = {"HYBRID_MEGATRON_CLUSTER": str(settings)}
        self.job = ""

    def submit(self, *options: str) -> str:
        """With a plain sbatch."""
        log = f"--output={self.folder}/slurm-%j.out"
        script = TEMPLATES[self.nodes]
        self.job = self.cluster.sbatch("--gres=gpu:1", log, *options, script, *self.words, cwd=CHECKOUT, environment=self.environment)
        return self.job

    def launch(self, *words: str | Path, check: bool = True):
        """`python -m launch WORDS` on the login node; its output is text."""
        return launch(self.cluster, *words, check=check, environment=self.environment)

    @property
    def log(self) -> str:
        file = self.folder / f"slurm-{self.job}.out"
        return file.read_text() if file.is_file() else ""

    @property
    def steps(self) -> int:
        """Steps that metrics.jsonl has now."""
        file = self.run / "metrics.jsonl"
        return file.read_text().count("\n") if file.is_file() else 0

    def wait_for_steps(self, count: int, seconds: float = 300) -> None:
        self.wait_until(lambda: self.steps >= count, f"step {count}", seconds)

    def wait_until(self, happened: Callable[[], bool], what: str, seconds: float = 300) -> None:
        """Fails at once if the job ends before."""

        def now() -> bool:
            if happened():
                return True
            assert self.cluster.state(self.job) not in OVER, f"{what}: the job ended before\n{self.log}"
            return False

        wait_until(now, what, seconds, lambda: f"{self.steps} steps\n{self.log}")

    def end(self, state: str = "COMPLETED", seconds: float = 480) -> None:
        """Wait for the job's end, which must be this one."""
        found = self.cluster.wait_for_state(self.job, *OVER, seconds=seconds)
        assert found == state, f"{found}\n{self.log}"

    def go_on(self, undisturbed: list[dict]) -> None:
        """Submit the same again, which must end as if nothing had happened."""
        self.submit()
        self.end()
        self.check_complete(undisturbed)

    def signal(self, rank: int, number: int) -> None:
        """To the process of a rank."""
        (process,) = self.cluster.processes(self.job, rank=rank)
        os.kill(process, number)

    def node_of(self, rank: int) -> str:
        (node,) = [node for node in self.cluster.nodes if self.cluster.processes(self.job, rank=rank, node=node)]
        return node

    def attempts(self, job: str | None = None) -> list[str]:
        """How each start of the job ended, without when: `from CHECKPOINT: HOW`."""
        file = self.run / f"logs/job_{job or self.job}/attempts"
        return [line.partition(" ")[2] for line in file.read_text().splitlines()] if file.is_file() else []

    def restarts(self) -> int:
        return int(self.cluster.job(self.job)["Restarts"])

    def events(self, kind: str) -> list[dict]:
        lines = [json.loads(line) for line in (self.run / "events.jsonl").read_text().splitlines()]
        return [line for line in lines if line["event"] == kind]

    def check_computed(self, undisturbed: list[dict]) -> None:
        """Every step once, with bitwise the losses of the run that nothing disturbed, and nothing half done left."""
        assert computed(self.run) == undisturbed, self.log
        assert checkpoints(self.run)[-1] == f"step_{len(undisturbed):08d}"
        assert not [path for path in self.run.rglob("*") if path.name.endswith((".partial", ".new"))]

    def check_complete(self, undisturbed: list[dict]) -> None:
        """That, and one wandb run with every step, however many starts it took."""
        self.check_computed(undisturbed)
        starts = {path.name.rpartition("-")[2] for path in (self.run / "wandb").glob("offline-run-*")}
        [run_id] = starts
        assert run_id == (self.run / "RUN_ID").read_text().strip()
        assert recorded_steps(self.run / "wandb", run_id) == set(range(1, len(undisturbed) + 1))


def launch(cluster: Cluster, *words: str | Path, **how):
    return cluster.run(sys.executable, "-m", "launch", *map(str, words), cwd=CHECKOUT, **how)
