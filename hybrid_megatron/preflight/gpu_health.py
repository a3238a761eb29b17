"""What the driver knows of its GPUs, by nvidia-smi and the kernel's log: ECC errors, rows of memory to remap, slowed clocks, Xid errors."""

import re
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from hybrid_megatron.preflight.agreement import named
from hybrid_megatron.preflight.finding import Finding, Level, fine

RECENT_SECONDS = 3600.0
"""Xid errors longer ago are not told: the node was put back into service since."""
_SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
_XID = re.compile(r"^\[\s*([\d.]+)\].*NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")


@dataclass(frozen=True)
class GPUHealth:
    """Of one GPU."""

    index: int
    uuid: str
    uncorrectable: int
    """Uncorrectable ECC errors since the driver was loaded."""
    remap_failed: bool
    """A row of memory is bad and there is no spare one left."""
    reset_needed: str
    """Why this GPU wants a reset; empty if it does not."""
    slowed: list[str]
    """Reasons for which its clocks are held down, beside idling and the power limit."""


@dataclass(frozen=True)
class NodeHealth:
    gpus: list[GPUHealth]
    xids: list[str]
    """Recent Xid errors: `79 of PCI 0000:3b:00`."""
    silent: str = ""
    """Why nvidia-smi said nothing; empty where it did, or where there is none."""


def gather_health(seconds: float = 15.0) -> NodeHealth:
    try:
        done = subprocess.run(["nvidia-smi", "-q", "-x"], capture_output=True, text=True, timeout=seconds)
    except OSError:
        return NodeHealth([], [])
    except subprocess.TimeoutExpired:
        return NodeHealth([], recent_xids(_kernel_log()), f"it did not answer within {seconds:.0f} s")
    if done.returncode:
        return NodeHealth([], recent_xids(_kernel_log()), (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()[0])
    return NodeHealth(read_health(done.stdout), recent_xids(_kernel_log()))


def read_health(xml: str) -> list[GPUHealth]:
    """From the output of `nvidia-smi -q -x`; what a driver does not tell counts as in order."""
    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError:
        return []
    return [_of_gpu(index, gpu) for index, gpu in enumerate(root.iter("gpu"))]


def _of_gpu(index: int, gpu: ElementTree.Element) -> GPUHealth:
    volatile = gpu.find("ecc_errors/volatile")
    errors = [each.text or "" for each in volatile if "uncorrectable" in each.tag] if volatile is not None else []
    action = (gpu.findtext("gpu_recovery_action") or "None").strip()
    pending = [tag for tag in ("remapped_row_pending", "channel_repair_pending", "tpc_repair_pending") if _yes(gpu, tag)]
    reasons = {each.tag.rsplit("_reason_", 1)[-1]: (each.text or "").strip() for each in gpu.iter() if "_reason_" in each.tag}
    return GPUHealth(
        index,
        (gpu.findtext("uuid") or "").strip().removeprefix("GPU-"),
        sum(int(text) for text in errors if text.strip().isdigit()),
        _yes(gpu, "remapped_row_failure"),
        "" if action in ("None", "N/A") and not pending else ", ".join([*([action] if action not in ("None", "N/A") else []), *pending]),
        [reason for reason in _SLOWDOWNS if reasons.get(reason) == "Active"],
    )


def _yes(gpu: ElementTree.Element, tag: str) -> bool:
    return any((each.text or "").strip() == "Yes" for each in gpu.iter(tag))


def recent_xids(log: str, uptime: float | None = None) -> list[str]:
    """Xid errors of the last hour, from lines as dmesg prints them; `uptime` in seconds."""
    if uptime is None:
        uptime = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else 0.0
    found = (_XID.match(line) for line in log.splitlines())
    return [f"{match[3]} of PCI {match[2]}" for match in found if match and uptime - float(match[1]) < RECENT_SECONDS]


def _kernel_log() -> str:
    """Empty where a user may not read it, as on most clusters."""
    if not Path("/proc/driver/nvidia").is_dir():
        return ""
    try:
        return subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=5).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def judge_health(health: dict[str, NodeHealth], uuids: dict[str, set[str]]) -> list[Finding]:
    """`uuids`: of the job's own GPUs, by node; where they are known, others on the node are nobody's business."""
    findings = []
    told = 0
    for node, each in health.items():
        if each.silent:
            way_out = "a driver that hangs or fails usually wants the node to be rebooted"
            findings.append(Finding("GPU health", Level.WARNING, f"nvidia-smi on {node}: {each.silent}", way_out=way_out))
        if each.xids:
            found = f"{node}: Xid {named(each.xids)} within the last hour"
            findings.append(Finding("GPU health", Level.WARNING, found, "the driver has met an error", "look at dmesg there"))
        mine = [gpu for gpu in each.gpus if not uuids[node] or gpu.uuid in uuids[node]]
        told += len(mine)
        findings += [finding for gpu in mine for finding in _of_one(node, gpu)]
    return findings or [fine("GPU health", f"nothing remarkable in {told} GPUs" if told else "there is no nvidia-smi to ask")]


def _of_one(node: str, gpu: GPUHealth) -> list[Finding]:
    where, findings = f"GPU {gpu.index} of {node}", []
    if gpu.uncorrectable:
        found = f"{where} has had {gpu.uncorrectable} uncorrectable ECC errors since its driver was loaded"
        findings.append(Finding("GPU health", Level.BAD_NODE, found, way_out="it wants a reset", nodes=(node,)))
    if gpu.remap_failed:
        found = f"{where} has a bad row of memory that cannot be remapped"
        findings.append(Finding("GPU health", Level.BAD_NODE, found, way_out="it wants to be replaced", nodes=(node,)))
    if gpu.reset_needed:
        findings.append(Finding("GPU health", Level.WARNING, f"{where} waits for a reset: {gpu.reset_needed}"))
    if gpu.slowed:
        found = f"{where} holds its clocks down: {', '.join(gpu.slowed)}"
        findings.append(Finding("GPU health", Level.WARNING, found, "heat or a lack of power; the sniff below says how slow it is"))
    return findings
