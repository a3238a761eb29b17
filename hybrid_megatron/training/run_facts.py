"""What a run should be known by afterwards and its recipe does not say: code, packages, machine, job, size of the model."""

import importlib.metadata
import json
import os
import platform as python_platform
import subprocess
from pathlib import Path

from hybrid_megatron import platform
from hybrid_megatron.model.accounting import Accounts
from hybrid_megatron.parallel import ParallelState
from hybrid_megatron.training.run_folder import RunFolder

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "triton", "megatron-core", "flash-linear-attention", "fla-core", "transformer-engine", "numpy", "omegaconf", "wandb")
_SLURM = ("JOB_ID", "JOB_NAME", "JOB_PARTITION", "JOB_NODELIST", "JOB_NUM_NODES", "RESTART_COUNT", "CLUSTER_NAME")


def run_facts(state: ParallelState, accounts: Accounts, folder: RunFolder | None) -> dict:
    """Plain data, on rank 0; the others get nothing, since git is asked."""
    if folder is None:
        return {}
    return {
        "code_version": code_version(),
        "packages": package_versions(),
        "device": platform.device_name(),
        "world_size": state.world_size,
        "layout": state.layout,
        "parameters": accounts.total_params,
        "flops_per_token": accounts.flops_per_token,
        "starts": _starts(folder),
        "slurm": slurm_job(),
    }


def code_version(root: Path = _ROOT) -> str:
    """The git commit of the checkout at `root`, `-dirty` behind it where tracked files differ.

    A copy of the code that is no checkout has the one line of its file `code_version` instead; without either: unknown.
    """
    if (root / ".git").exists():  # not that of a folder above
        try:
            commit = _git(root, "rev-parse", "HEAD")
            return commit + ("-dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
        except (OSError, subprocess.SubprocessError):
            return "unknown"
    try:
        return (root / "code_version").read_text().strip() or "unknown"
    except OSError:
        return "unknown"


def is_checkout(root: Path = _ROOT) -> bool:
    return (root / ".git").exists()


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def package_versions() -> dict[str, str]:
    """Of those that decide what is computed, as far as they are installed."""
    versions = {"python": python_platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def slurm_job() -> dict[str, str]:
    """What Slurm says of this job, by the names of its variables in small letters: job_id, job_nodelist, ...; empty outside of a job."""
    return {name.lower(): os.environ[f"SLURM_{name}"] for name in _SLURM if os.environ.get(f"SLURM_{name}")}


def _starts(folder: RunFolder) -> int:
    """How often this run has been started, this time included: its `start` events."""
    try:
        lines = (folder.path / "events.jsonl").read_text().splitlines()
    except OSError:
        return 1
    return max(1, sum(_kind(line) == "start" for line in lines))


def _kind(line: str) -> str | None:
    try:
        return json.loads(line)["event"]
    except (ValueError, KeyError, TypeError):
        return None
