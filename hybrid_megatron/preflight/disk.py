"""Disks: room for the checkpoints to come, and for what Triton, NCCL and others write on each node."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from hybrid_megatron.planning.memory import GIB
from hybrid_megatron.preflight.agreement import named
from hybrid_megatron.preflight.file_systems import FileSystem, existing_folder, file_system_of
from hybrid_megatron.preflight.finding import Finding, Level, fine

LEAST = {"/tmp": GIB // 4, "/dev/shm": GIB, "Triton cache": GIB}
"""Bytes below which a node's own folders are said to be short of room: NCCL moves data between processes through /dev/shm, Triton keeps
every kernel it compiles, and /tmp is everybody's."""


@dataclass(frozen=True)
class Space:
    """Room in the nearest existing folder above a path."""

    path: str
    free: int
    writable: bool
    file_system: FileSystem


def triton_cache() -> Path:
    """Where Triton keeps compiled kernels, by its own rules."""
    home = os.environ.get("TRITON_HOME") or Path.home()
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache")


def gather_spaces() -> dict[str, Space]:
    """Of a node's own folders, by the names in `LEAST`; those that do not exist here are left out."""
    places = {"/tmp": Path(os.environ.get("TMPDIR") or "/tmp"), "/dev/shm": Path("/dev/shm"), "Triton cache": triton_cache()}
    return {what: space_at(path) for what, path in places.items() if what != "/dev/shm" or path.is_dir()}


def space_at(path: Path) -> Space:
    folder = existing_folder(path)
    return Space(str(path), shutil.disk_usage(folder).free, os.access(folder, os.W_OK), file_system_of(folder))


def judge_spaces(spaces: dict[str, dict[str, Space]], is_cuda: bool) -> list[Finding]:
    """`spaces`: of each node. On CPUs nothing is compiled by Triton and nothing goes through NCCL."""
    findings = []
    for what, least in LEAST.items():
        if not is_cuda and what != "/tmp":
            continue
        here = {node: each[what] for node, each in spaces.items() if what in each}
        closed = [node for node, space in here.items() if not space.writable]
        if closed:
            found = f"{what}: {here[closed[0]].path} cannot be written on {named(closed)}"
            level = Level.REFUSED if len(closed) == len(spaces) else Level.BAD_NODE
            nodes = tuple(closed) if level == Level.BAD_NODE else ()
            findings.append(Finding("disk", level, found, way_out=_way_out(what), nodes=nodes))
        short = [node for node, space in here.items() if space.free < least and node not in closed]
        if short:
            found = f"{what}: {size(min(here[node].free for node in short))} free on {named(short)}"
            findings.append(Finding("disk", Level.WARNING, found, f"less than {size(least)}", _way_out(what)))
    shared = [node for node, each in spaces.items() if each["Triton cache"].file_system.network]
    if shared and is_cuda:
        space = spaces[shared[0]]["Triton cache"]
        findings.append(
            Finding(
                "Triton cache",
                Level.WARNING,
                f"{space.path} lies on {space.file_system.kind}, which nodes share",
                "ranks that compile into it at once meet stale file handles and wait for minutes",
                "set TRITON_CACHE_DIR to a folder of the node, as slurm/env.sh does",
            )
        )
    return findings or [fine("disk", "room in " + ", ".join(f"{what} {size(space.free)}" for what, space in _first(spaces).items()))]


@dataclass(frozen=True)
class CheckpointNeed:
    """Bytes that a run will write, beyond what lies there already."""

    one: int
    """A checkpoint."""
    rolling: int
    """Until the oldest go as new ones come: `keep_last`, and the one being written."""
    permanent: int
    """Those that stay, over the whole rest of the run."""


def checkpoint_need(one: int, keep_last: int, existing: int, permanent: int) -> CheckpointNeed:
    """`existing`: rolling checkpoints there are; `permanent`: how many permanent ones are still to come."""
    return CheckpointNeed(one, one * max(1, keep_last + 1 - existing), one * permanent)


def judge_run_space(space: Space, need: CheckpointNeed) -> list[Finding]:
    """Of the run folder. Quotas are not seen: `free` is what the file system has."""
    where = f"run_dir: {space.path} has {size(space.free)} free"
    told = f"a checkpoint takes {size(need.one)}"
    way_out = "free some, lower checkpoint.keep_last, or give another run_dir=PATH"
    if space.free < need.rolling:
        count = need.rolling // need.one
        return [Finding("disk of run", Level.REFUSED, where, f"{told}, and {size(need.rolling)} are needed for {count} of them", way_out)]
    if space.free < need.rolling + need.permanent:
        rule = f"{told}; permanent ones will take {size(need.permanent)} by the end of the run"
        return [Finding("disk of run", Level.WARNING, where, rule, "move finished ones away in time, or keep fewer")]
    return [fine("disk of run", f"{size(space.free)} free, {size(need.rolling + need.permanent)} needed")]


def size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB // 4 else f"{count / 2**20:.1f} MiB"


def _first(spaces: dict[str, dict[str, Space]]) -> dict[str, Space]:
    return next(iter(spaces.values()))


def _way_out(what: str) -> str:
    return {
        "/tmp": "clean it up, or set TMPDIR to another folder of the node",
        "/dev/shm": "clean it up; in a container, start it with a larger one (--shm-size)",
        "Triton cache": "set TRITON_CACHE_DIR to a folder of the node with room",
    }[what]
