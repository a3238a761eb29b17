"""The scripts of slurm/ without a Slurm: srun runs the command here and now, scontrol says what a file says, requests are noted."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.cpu.runs import CHECKOUT

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
case "$*" in
    *"show hostnames"*) echo node1 ;;
    *"show job"*) cat "$FAKE/job" ;;
    *"show node"*) cat "$FAKE/node" ;;
    *) echo "scontrol $*" >>"$FAKE/asked" ;;
esac
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >>"$FAKE/asked"
"""
# In torchrun's place a process with one child, as node.sh looks for; what the child does is `training`.
PYTHON = """#!/bin/bash
case "$*" in
    *"launch run-dir"*) echo "$FAKE/run" ;;
    *"launch train"*) bash "$FAKE/training.sh" & wait ;;
esac
"""
RUNNING = "JobId=7 JobState=RUNNING Reason=None Restarts=0 RunTime=00:00:01"
IDLE = "NodeName=node1 Arch=x86_64 CPUAlloc=0 State=IDLE ThreadsPerCore=1"


class Job:
    """A job of one node whose training is lines of bash; `folder/run` is its run folder."""

    def __init__(self, folder: Path, training: str = "echo complete >$HYBRID_MEGATRON_OUTCOME", settings: str | None = "PREFLIGHT=no"):
        self.folder, self.run = folder, folder / "run"
        self.own = self.run / "logs/job_7"
        self.bin = folder / "bin"
        for path, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL), ("python", PYTHON)):
            self.bin.mkdir(exist_ok=True)
            (self.bin / path).write_text(text)
            (self.bin / path).chmod(0o755)
        self.run.mkdir(exist_ok=True)
        (folder / "training.sh").write_text(training)
        self.says(RUNNING, IDLE)
        self.settings = folder / "cluster.env"
        if settings is not None:
            self.settings.write_text(f"PYTHON={self.bin / 'python'}\nRETRY_SECONDS=0\n{settings}\n")

    def says(self, job: str, node: str = IDLE) -> None:
        """What scontrol says from now on."""
        (self.folder / "job").write_text(job + "\n")
        (self.folder / "node").write_text(node + "\n")

    def start(self, *words: str, script: str = "slurm/train_8xh200.sbatch", cwd: Path = CHECKOUT, **environment: str) -> subprocess.Popen:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HYBRID_MEGATRON_"))}
        env |= {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "FAKE": str(self.folder),
            "HYBRID_MEGATRON_CLUSTER": str(self.settings),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_UID": "0",
            "SLURM_JOB_NODELIST": "node1",
            "SLURM_NNODES": "1",
            "SLURM_CPUS_ON_NODE": "1",
            "SLURMD_NODENAME": "node1",
            "LOCAL_TMP": str(self.folder),
        }
        words = words or (str(self.run / "submitted.yaml"),)
        return subprocess.Popen(
            ["bash", str(CHECKOUT / script), *words],
            cwd=cwd,
            env=env | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self, process: subprocess.Popen) -> tuple[int, list[str], list[str]]:
        """Exit code, lines of stdout, lines of stderr."""
        try:
            out, err = process.communicate(timeout=60)
        finally:
            kill_all(process)
        return process.returncode, out.splitlines(), err.splitlines()

    def call(self, *words: str, **how) -> tuple[int, list[str], list[str]]:
        return self.end(self.start(*words, **how))

    @property
    def attempts(self) -> list[str]:
        """Without when."""
        file = self.own / "attempts"
        return [line.partition(" ")[2] for line in file.read_text().splitlines()] if file.is_file() else []

    @property
    def asked(self) -> list[str]:
        """What Slurm was asked for."""
        file = self.folder / "asked"
        return file.read_text().splitlines() if file.is_file() else []


def kill_all(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def wait_for(happened: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
