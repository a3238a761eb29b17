"""Software: what pyproject.toml asks for, the same on every node, and a triton that computes right on these GPUs."""

import platform as python_platform
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement

from hybrid_megatron import platform
from hybrid_megatron.preflight.report import Finding, Level, named, odd_ones

_COMPUTE = ("torch", "megatron-core", "flash-linear-attention", "triton", "numpy")
"""What a training step runs on; the other requirements serve beside it."""
_KERNELS = ("flash-linear-attention", "triton")
_PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
_WAY_OUT = "install what constraints.txt pins (make setup), in one environment that all nodes share"


@dataclass(frozen=True)
class Software:
    """Of one node."""

    versions: dict[str, str | None]
    """By package; also `python`, `CUDA` (what torch was built for), `NCCL` and `driver`. None: not there."""
    unmet: dict[str, str]
    """Requirements of pyproject.toml that are not met, by package: what is wrong, in words."""
    pair_problem: str | None
    """Of triton and the node's GPUs taken together, where the recipe needs both."""
    engine_problem: str | None
    """Of Transformer Engine, where the recipe asks for it."""


def gather_software(needs_fla: bool, engine_problem: str | None) -> Software:
    versions = {"python": python_platform.python_version()} | {package: _version(package) for package in _COMPUTE}
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if platform.is_cuda() else None
    versions |= {"CUDA": torch.version.cuda, "NCCL": nccl, "driver": _driver_version()}
    required = [each for each in _requirements() if needs_fla or each.name not in _KERNELS]
    unmet = {each.name: problem for each in required if (problem := _unmet(each))}
    pair_problem = platform.kernel_pair_problem() if needs_fla else None
    return Software(versions, unmet, pair_problem, engine_problem)


def judge_software(software: dict[str, Software], cuda: bool) -> list[Finding]:
    findings = []
    for package, problem in dict.fromkeys(unmet for each in software.values() for unmet in each.unmet.items()):
        level = Level.REFUSED if cuda and package in _COMPUTE else Level.WARNING
        nodes = named(node for node, each in software.items() if package in each.unmet)
        findings.append(Finding("versions", level, f"{problem} on {nodes}; {_WAY_OUT}"))
    for package in next(iter(software.values())).versions:
        usual, odd = odd_ones({node: each.versions[package] for node, each in software.items()})
        if odd:
            others = ", ".join(f"{version or 'none'} on {node}" for node, version in odd.items())
            found = f"{package} is {usual or 'not there'} on {named(node for node in software if node not in odd)}, {others}"
            if package == "driver":
                findings.append(Finding("versions", Level.WARNING, f"{found}; nodes may compute differently"))
            else:
                findings.append(Finding("versions", Level.REFUSED, f"{found}; all nodes must run the same software: {_WAY_OUT}"))
    problems = dict.fromkeys(each.pair_problem for each in software.values() if each.pair_problem)
    findings += [Finding("triton and GPU", Level.REFUSED, problem) for problem in problems]
    problems = dict.fromkeys(each.engine_problem for each in software.values() if each.engine_problem)
    findings += [Finding("Transformer Engine", Level.REFUSED, problem) for problem in problems]
    first = next(iter(software.values())).versions
    told = ", ".join(f"{name} {version}" for name, version in first.items() if version)
    return findings or [Finding("versions", Level.FINE, told)]


def _requirements() -> list[Requirement]:
    """What the checkout asks for on this system; nothing where the library is used without it."""
    asked = tomllib.loads(_PYPROJECT.read_text())["project"]["dependencies"] if _PYPROJECT.is_file() else []
    return [each for each in map(Requirement, asked) if each.marker is None or each.marker.evaluate()]


def _unmet(requirement: Requirement) -> str | None:
    version = _version(requirement.name)
    if version is None:
        return f"{requirement.name} is not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} is {version}, and {requirement.specifier} is needed"
    return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver_version() -> str | None:
    try:  # NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  ...; the version is the first word of numbers and dots
        words = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if "." in word and word.replace(".", "").isdigit()), None)
