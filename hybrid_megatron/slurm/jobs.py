"""The jobs of a run folder: jobs.jsonl, and what Slurm knows of them. All run the recipe submitted.yaml.

A line of jobs.jsonl: id, time; of jobs that `launch submit` submitted also code (hash of its snapshot), options (of sbatch), dependency.
One more line says when `launch cancel` was first asked to end it: id, time, cancelled.
"""

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from hybrid_megatron.errors import ConfigError, RunError

RECIPE = "submitted.yaml"
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED")
"""States from which a job does not come back; completing is none, since one that is being requeued completes first."""

TIME = "%Y-%m-%dT%H:%M:%S%z"

_COLUMNS = ("id", "state", "reason", "nodes", "elapsed", "left", "start")
_FORMAT = "%i|%T|%r|%N|%M|%L|%S"
_NOT_FOUND_BY_BASH = 127
_OF_A_RUN_FOLDER = (RECIPE, "jobs.jsonl", "config.yaml", "checkpoints", ".lock.*")
"""One of these is in every folder in which a run was submitted or has begun."""


@dataclass(frozen=True)
class Job:
    """A job that Slurm knows, in squeue's words."""

    id: str
    state: str
    reason: str
    nodes: str
    elapsed: str
    left: str
    """Time to its limit."""
    start: str
    """When it started or is expected to."""

    @property
    def active(self) -> bool:
        """Whether it runs, or will."""
        return self.state not in OVER


def check_run_folder(path: Path) -> None:
    """Raise ConfigError unless it is the folder of a run."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; name the run folder of a job")
    if not any(next(path.glob(name), None) for name in _OF_A_RUN_FOLDER):
        raise ConfigError(f"{path}: no run was submitted or has begun in this folder; name the run folder of a job")


def recorded(run_dir: Path) -> list[dict]:
    """The lines of jobs.jsonl, oldest first, one a job."""
    file, lines = run_dir / "jobs.jsonl", {}
    for line in file.read_text().splitlines() if file.is_file() else []:
        try:
            entry = json.loads(line)
            lines[entry["id"]] = entry | lines.get(entry["id"], {})
        except (ValueError, KeyError, TypeError):  # cut off by a full disk
            continue
    return list(lines.values())


def record(run_dir: Path, job: str, **facts) -> None:
    """What was said of a job first counts."""
    with open(run_dir / "jobs.jsonl", "a") as file:
        file.write(json.dumps({"id": job, "time": time.strftime(TIME), **facts}) + "\n")


def record_cancelled(run_dir: Path, job: str) -> None:
    record(run_dir, job, cancelled=time.strftime(TIME))


def known_to_slurm(ids: list[str]) -> dict[str, Job]:
    """Of these jobs those that Slurm still knows: it forgets one some minutes after its end. Raises RunError if Slurm does not answer."""
    if not ids:
        return {}
    command = ["squeue", "--noheader", "--states=all", f"--jobs={','.join(ids)}", f"--format={_FORMAT}"]
    ended = ask_slurm(command)
    if ended.returncode and "Invalid job id" not in ended.stderr:  # which it says of a single unknown one
        raise RunError(f"{_failed(ended)}; try again when Slurm answers")
    jobs = [Job(**dict(zip(_COLUMNS, line.split("|")))) for line in ended.stdout.splitlines() if line.count("|") == len(_COLUMNS) - 1]
    return {job.id: job for job in jobs}


def active_jobs(run_dir: Path) -> list[Job]:
    return [job for job in known_to_slurm([entry["id"] for entry in recorded(run_dir)]).values() if job.active]


def ask_slurm(command: list[str], **how) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **how)
    except FileNotFoundError:
        raise _not_found(command[0]) from None


def told_by(ended: subprocess.CompletedProcess) -> str:
    """What a command of Slurm's printed; raises RunError with its last words if it failed."""
    if ended.returncode == _NOT_FOUND_BY_BASH:
        raise _not_found(ended.args[0])
    if ended.returncode:
        raise RunError(_failed(ended))
    return ended.stdout.strip()


def _not_found(command: str) -> RunError:
    return RunError(f"{command}: not found; this is for a node where Slurm's commands are, such as a login node")


def _failed(ended: subprocess.CompletedProcess) -> str:
    """The command and its last words, which begin with its name too, and perhaps with `error`."""
    command, words = ended.args[0], (ended.stderr.strip().splitlines() or ["it failed without a word"])[-1]
    return f"{command}: {words.removeprefix(f'{command}: ').removeprefix('error: ')}"
