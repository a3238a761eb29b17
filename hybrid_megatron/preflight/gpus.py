"""GPUs: one for every process, of one kind, with as much free memory as the recipe is estimated to need."""

import os
from dataclasses import dataclass

import psutil
import torch

from hybrid_megatron import platform
from hybrid_megatron.planning.choices import USABLE
from hybrid_megatron.planning.memory import GIB
from hybrid_megatron.preflight.agreement import named, odd_ones
from hybrid_megatron.preflight.finding import Finding, Level, fine
from hybrid_megatron.preflight.job import Job

OTHERS_BYTES = 2 * GIB
"""Memory in use on a GPU that is no more than what this process' own CUDA context and the driver take."""


@dataclass(frozen=True)
class Device:
    """What one process computes on."""

    name: str
    """As the driver reports it; `CPU`; empty where the process has no GPU of its own."""
    is_cuda: bool
    visible: int
    """GPUs that this process sees."""
    uuid: str
    total: int
    """Bytes: of the GPU, or this process' share of the node's memory."""
    free: int

    @property
    def usable(self) -> bool:
        """Whether the process has something of its own to compute on."""
        return bool(self.name)


def gather_device(local_rank: int, processes: int) -> Device:
    """Of this process, which is one of so many on its node. Makes its GPU the current one."""
    if not platform.is_cuda():
        memory = psutil.virtual_memory()
        return Device("CPU", False, 0, "", memory.total // processes, memory.available // processes)
    visible = torch.cuda.device_count()
    if local_rank >= visible:
        return Device("", True, visible, "", 0, 0)
    platform.select_device()
    free, total = torch.cuda.mem_get_info()
    uuid = str(torch.cuda.get_device_properties(local_rank).uuid).removeprefix("GPU-")
    return Device(torch.cuda.get_device_name(), True, visible, uuid, total, free)


def gpus_promised() -> bool:
    """Whether Slurm says that this node's processes have GPUs."""
    return bool(os.environ.get("SLURM_GPUS_ON_NODE") or os.environ.get("SLURM_JOB_GPUS"))


def judge_gpus(job: Job, devices: list[Device], promised: bool = False) -> list[Finding]:
    """Number and kind. `promised`: Slurm has given GPUs to this job."""
    cuda = {node: devices[ranks[0]].is_cuda for node, ranks in job.ranks.items()}
    if not any(cuda.values()):
        found = fine("GPUs", f"none: {job.size} process{'es' if job.size > 1 else ''} on CPUs")
        if promised:
            found = Finding(
                "GPUs", Level.WARNING, "Slurm gives this job GPUs and torch sees none", "it would train on CPUs", "look at nvidia-smi there"
            )
        return [found]
    blind = tuple(node for node, sees in cuda.items() if not sees)
    if blind:
        return [_bad("GPUs", f"torch sees no GPU on {named(blind)}, and GPUs on the others", blind)]
    short = {node: devices[ranks[0]].visible for node, ranks in job.ranks.items() if devices[ranks[0]].visible < len(ranks)}
    if len(short) == len(job.ranks):
        node, visible = next(iter(short.items()))
        asked = len(job.ranks[node])
        way_out = f"start {visible} a node (torchrun --nproc-per-node {visible}), or ask Slurm for more (--gres=gpu:{asked})"
        return [Finding("GPUs", Level.REFUSED, f"{asked} processes on {node}, which sees {visible} GPUs", "each has its own", way_out)]
    if short:
        seen = ", ".join(f"{node} sees {visible} GPUs for {len(job.ranks[node])} processes" for node, visible in short.items())
        return [_bad("GPUs", seen, tuple(short))]
    findings = []
    usual, odd = odd_ones({job.place(rank, "GPU"): device.name for rank, device in enumerate(devices)})
    if odd:
        others = "; ".join(f"{place} is {name}" for place, name in odd.items())
        findings.append(Finding("GPUs", Level.WARNING, f"most are {usual}; {others}", "every step goes at the pace of the slowest"))
    idle = {node: devices[ranks[0]].visible for node, ranks in job.ranks.items() if devices[ranks[0]].visible > len(ranks)}
    if idle:
        node, visible = next(iter(idle.items()))
        findings.append(
            Finding("GPUs", Level.WARNING, f"{node} sees {visible} GPUs and has {len(job.ranks[node])} process", "the others are not used")
        )
    return findings or [fine("GPUs", f"{len(devices)} x {usual}")]


def judge_memory(job: Job, devices: list[Device], need: int) -> list[Finding]:
    """`need`: bytes that the recipe is estimated to take at its peak on the GPU that needs most (planning/memory.py)."""
    smallest = min(devices, key=lambda device: device.total)
    told = f"the recipe is estimated to need {_gib(need)} a GPU at its peak"
    way_out = "python -m launch plan RECIPE says which layout fits; or lower train.micro_batch, or set train.recompute=selective or full"
    if not smallest.is_cuda:
        if need > smallest.free:
            found = f"{told.replace('GPU', 'process')}, and the node has {_gib(smallest.free)} a process free"
            return [Finding("memory", Level.WARNING, found, way_out=way_out)]
        return [fine("memory", f"{_gib(need)} a process estimated, {_gib(smallest.free)} free")]
    if need > smallest.total:
        return [Finding("memory", Level.REFUSED, f"{told}, and {smallest.name} has {_gib(smallest.total)}", way_out=way_out)]
    findings = []
    for rank, device in enumerate(devices):
        used = device.total - device.free
        if used > OTHERS_BYTES:
            found = f"{job.place(rank, 'GPU')} has {_gib(used)} in use before the run begins, so another process is on it"
            if need > device.free:
                found += f"; {told}, and {_gib(device.free)} are free"
            level, nodes = (Level.BAD_NODE, (job.node_of(rank),)) if need > device.free else (Level.WARNING, ())
            findings.append(Finding("memory", level, found, way_out="nvidia-smi there shows the processes", nodes=nodes))
    if need > USABLE * smallest.total:
        rule = f"CUDA, NCCL and fragmentation take some 8% of the {_gib(smallest.total)}"
        findings.append(Finding("memory", Level.WARNING, told, rule, way_out))
    return findings or [fine("memory", f"{_gib(need)} a GPU estimated, {_gib(min(device.free for device in devices))} free")]


def _bad(check: str, found: str, nodes: tuple[str, ...]) -> Finding:
    return Finding(check, Level.BAD_NODE, found, way_out="look at nvidia-smi and dmesg there", nodes=nodes)


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
