"""What a run should be known by afterwards and its recipe does not say: code, packages, machine, job, size of the model."""

import importlib.metadata
import json
import os
import platform as python_platform

from hybrid_megatron import platform
from hybrid_megatron.code_version import code_version
from hybrid_megatron.model.accounting import Accounts
from hybrid_megatron.parallel import ParallelState
from hybrid_megatron.training.run_folder import RunFolder

_PACKAGES = ("torch", "triton", "megatron-core", "flash-linear-attention", "fla-core", "transformer-engine", "numpy", "omegaconf", "wandb")
_SLURM = ("JOB_ID", "JOB_NAME", "JOB_PARTITION", "JOB_NODELIST", "JOB_NUM_NODES", "RESTART_COUNT", "CLUSTER_NAME")


def run_facts(state: ParallelState, accounts: Accounts, folder: RunFolder | None) -> dict:
    """Plain data, on rank 0; the others get nothing, since git is asked."""
    if folder is None:
        return {}
    return {
        "code_version": code_version() or "unknown",
        "packages": package_versions(),
        "device": platform.device_name(),
        "world_size": state.world_size,
        "layout": state.layout,
        "parameters": accounts.total_params,
        "flops_per_token": accounts.flops_per_token,
        "starts": _starts(folder),
        "slurm": slurm_job(),
    }


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
