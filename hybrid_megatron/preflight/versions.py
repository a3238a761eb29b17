"""Software: what pyproject.toml asks for, and the same on every node."""

import platform as python_platform
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement

from hybrid_megatron import platform
from hybrid_megatron.preflight.agreement import named, odd_ones
from hybrid_megatron.preflight.finding import Finding, Level, fine

CHECKOUT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "megatron-core", "flash-linear-attention", "triton", "numpy")
_WAY_OUT = "install what constraints.txt pins (make setup), in one environment that all nodes share"


@dataclass(frozen=True)
class Software:
    """Of one node."""

    versions: dict[str, str | None]
    """By package; also `python`, `CUDA` (what torch was built for), `NCCL` and `driver`. None: not there."""
    unmet: list[str]
    """Requirements of pyproject.toml that are not met, in words."""
    is_cuda: bool


def gather_software() -> Software:
    versions: dict[str, str | None] = {"python": python_platform.python_version()}
    versions |= {package: _version(package) for package in _PACKAGES}
    versions |= {"CUDA": torch.version.cuda, "NCCL": _nccl_version(), "driver": _driver_version()}
    return Software(versions, [text for text in map(_unmet, _requirements()) if text], platform.is_cuda())


def judge_software(software: dict[str, Software], pair_problems: dict[str, str | None]) -> list[Finding]:
    """`pair_problems`: what platform.kernel_pair_problem says on each node, where the recipe has mixers that need those kernels."""
    findings = [
        Finding("versions", Level.REFUSED if each.is_cuda else Level.WARNING, f"{node}: {text}", way_out=_WAY_OUT)
        for node, each in software.items()
        for text in each.unmet
    ]
    for package in next(iter(software.values())).versions:
        usual, odd = odd_ones({node: each.versions[package] for node, each in software.items()})
        if odd:
            others = ", ".join(f"{version or 'none'} on {node}" for node, version in odd.items())
            only = package == "driver"
            findings.append(
                Finding(
                    "versions",
                    Level.WARNING if only else Level.REFUSED,
                    f"{package} is {usual or 'not there'} on {named(set(software) - set(odd))}, {others}",
                    "nodes may compute differently" if only else "all nodes must run the same software",
                    "" if only else _WAY_OUT,
                )
            )
    findings += [Finding("triton and GPU", Level.REFUSED, problem) for problem in dict.fromkeys(pair_problems.values()) if problem]
    first = next(iter(software.values())).versions
    return findings or [fine("versions", ", ".join(f"{name} {version}" for name, version in first.items() if version))]


def _requirements() -> list[Requirement]:
    """What the checkout asks for; nothing where the library is used without it."""
    file = CHECKOUT / "pyproject.toml"
    return [Requirement(text) for text in tomllib.loads(file.read_text())["project"]["dependencies"]] if file.is_file() else []


def _unmet(requirement: Requirement) -> str | None:
    if requirement.marker is not None and not requirement.marker.evaluate():
        return None
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


def _nccl_version() -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if platform.is_cuda() else None


def _driver_version() -> str | None:
    try:  # NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  ...; the version is the first word of numbers and dots
        words = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), None)
