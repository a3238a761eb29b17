"""GPUs: one for every process, of one kind, in good health, with as much free memory as the recipe is estimated to need."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from hybrid_megatron import platform
from hybrid_megatron.planning.choices import USABLE
from hybrid_megatron.preflight.job import Job
from hybrid_megatron.preflight.report import Finding, Level, named, odd_ones, size

OTHERS_BYTES = 2 * 2**30
"""Memory in use on a GPU that is no more than what this process' own CUDA context and the driver take (below 1 GiB on an H200)."""
_HEALTH = ("ecc.errors.uncorrected.volatile.total", "remapped_rows.pending", "remapped_rows.failure")
_SMI_SECONDS = 15.0
_NVIDIA = "0x10de"
_LOOK = "look at nvidia-smi and dmesg there"


@dataclass(frozen=True)
class Device:
    """What one process computes on."""

    name: str
    """As the driver reports it; `CPU`; empty where the process has no GPU of its own."""
    visible: int = 0
    """GPUs that this process sees."""
    lost: bool = False
    """Slurm has given this node GPUs, it has some, and torch, built for them, sees none."""
    total: int = 0
    """Bytes of the GPU's memory."""
    free: int = 0
    health: tuple[str, ...] | None = None
    """What nvidia-smi says to `_HEALTH`; None where it says nothing."""
    given: str | None = None
    """GPUs that Slurm gave and torch does not see, whatever the reason; None too where the CPU is meant (`platform.gpus_given`)."""

    @property
    def is_cuda(self) -> bool:
        return self.name not in ("", "CPU")


def gather_device(local_rank: int) -> Device:
    """Of this process. Makes its GPU the current one."""
    if not platform.is_cuda():
        given = platform.gpus_given()
        return Device("CPU", lost=bool(given and torch.version.cuda and _nvidia_cards()), given=given)
    visible = torch.cuda.device_count()
    if local_rank >= visible:
        return Device("", visible)
    torch.cuda.set_device(local_rank)
    free, total = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved()  # what this process' own allocator keeps
    uuid = str(torch.cuda.get_device_properties(local_rank).uuid).removeprefix("GPU-")
    return Device(torch.cuda.get_device_name(), visible, False, total, free, _health(uuid))


def _health(uuid: str) -> tuple[str, ...] | None:
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(_HEALTH)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    values = tuple(value.strip() for value in done.stdout.strip().split(","))
    return values if done.returncode == 0 and len(values) == len(_HEALTH) else None


def _nvidia_cards(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    files = list(devices.glob("*/vendor")) if devices.is_dir() else []
    return any(file.read_text().strip() == _NVIDIA for file in files)


def of_one_kind(devices: list[Device]) -> bool:
    """Whether every process has something of its own to compute on, a GPU all of them or none, so that they can be measured together."""
    return all(device.name for device in devices) and len({device.is_cuda for device in devices}) == 1


def judge_gpus(job: Job, devices: list[Device]) -> list[Finding]:
    """Number, kind, health."""
    seen = {node: device.visible for node, device in job.of_nodes(devices).items()}
    if not any(seen.values()):
        lost = job.nodes_of(rank for rank, device in enumerate(devices) if device.lost)
        if lost:
            return [Finding("GPUs", Level.BAD_NODE, f"torch sees none of the GPUs of {named(lost)}; {_LOOK}", lost)]
        without = {node: device.given for node, device in job.of_nodes(devices).items() if device.given}
        if without:  # no card on any node's bus, as in a container without them: another node would do no better
            found = f"{named(without)}: {platform.torch_sees_none(next(iter(without.values())))}"
            return [Finding("GPUs", Level.REFUSED, found)]
        return [Finding("GPUs", Level.UNKNOWN, "torch sees none here, so there is nothing to count, measure or judge")]
    short = {node: visible for node, visible in seen.items() if visible < len(job.ranks[node])}
    told = ", ".join(f"{node} sees {visible} GPUs for {len(job.ranks[node])} processes" for node, visible in short.items())
    if len(short) == len(seen) and all(seen.values()):
        visible = min(short.values())
        return [Finding("GPUs", Level.REFUSED, f"{told}; start {visible} a node (--nproc-per-node {visible}), or ask Slurm for more GPUs")]
    if short:
        return [Finding("GPUs", Level.BAD_NODE, f"{told}; {_LOOK}", tuple(short))]
    findings = []
    usual, odd = odd_ones({job.place(rank): device.name for rank, device in enumerate(devices)})
    if odd:
        others = "; ".join(f"{place} is {name}" for place, name in odd.items())
        findings.append(Finding("GPUs", Level.WARNING, f"most are {usual}; {others}; every step goes at the pace of the slowest"))
    for node in seen:
        if seen[node] > len(job.ranks[node]):
            found = f"{seen[node]} on {node}, and {len(job.ranks[node])} of them examined; torchrun --nproc-per-node {seen[node]} takes all"
            findings.append(Finding("GPUs", Level.UNKNOWN, found))
    findings += [finding for rank, device in enumerate(devices) for finding in _judge_health(job, rank, device.health)]
    if any(device.health is None for device in devices):
        findings.append(Finding("GPU health", Level.UNKNOWN, "nvidia-smi does not tell of errors of all GPUs here"))
    return findings or [Finding("GPUs", Level.FINE, f"{len(devices)} x {usual}")]


def _judge_health(job: Job, rank: int, health: tuple[str, ...] | None) -> list[Finding]:
    """An uncorrectable error is contained by the driver and may never come again, so it is no reason to give up the node."""
    errors, pending, failure = health or ("0", "No", "No")
    findings = []
    if errors.isdigit() and int(errors):
        found = f"{job.place(rank)} has had {errors} uncorrectable memory errors since its driver was loaded; it wants a reset"
        findings.append(Finding("GPU health", Level.WARNING, found))
    if pending.lower() in ("yes", "1"):
        findings.append(Finding("GPU health", Level.WARNING, f"{job.place(rank)} waits for a reset to replace a bad row of memory"))
    if failure.lower() in ("yes", "1"):
        found = f"{job.place(rank)} has a bad row of memory and no spare one left; it wants to be replaced"
        findings.append(Finding("GPU health", Level.BAD_NODE, found, job.nodes_of([rank])))
    return findings


def judge_memory(job: Job, devices: list[Device], need: int) -> list[Finding]:
    """`need`: bytes that the recipe is estimated to take at its peak on the GPU that needs most (planning/memory.py)."""
    smallest = min(devices, key=lambda device: device.total)
    told = f"the recipe is estimated to need {size(need)} a GPU at its peak"
    way_out = "python -m launch plan RECIPE says which layout fits; or lower train.micro_batch, or set train.recompute=selective or full"
    if need > smallest.total:
        return [Finding("memory", Level.REFUSED, f"{told}, and {smallest.name} has {size(smallest.total)}; {way_out}")]
    findings = []
    for rank, device in enumerate(devices):
        used = device.total - device.free
        if used > OTHERS_BYTES:
            found = f"{job.place(rank)} has {size(used)} in use before the run begins, so another process is on it (nvidia-smi names it)"
            if need > device.free:
                found += f"; {told}, and {size(device.free)} are free"
                findings.append(Finding("memory", Level.BAD_NODE, found, job.nodes_of([rank])))
            else:
                findings.append(Finding("memory", Level.WARNING, found))
    if need > USABLE * smallest.total:
        found = f"{told}, and CUDA, NCCL and fragmentation take some {1 - USABLE:.0%} of the {size(smallest.total)}; {way_out}"
        findings.append(Finding("memory", Level.WARNING, found))
    free = min(device.free for device in devices)
    return findings or [Finding("memory", Level.FINE, f"{size(need)} a GPU estimated, {size(free)} free")]
