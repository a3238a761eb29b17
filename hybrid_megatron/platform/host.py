"""What of the host this process may take: cores, and memory that the machine and every control group above it (a Slurm job, a container)
have left."""

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_NO_LIMIT = 1 << 60
"""cgroup v1 says a number beyond any memory where there is no limit, v2 says `max`."""


def cores() -> int:
    """That this process may use, shared with torchrun's other processes on the node; at least one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, allowed // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def available_host_memory(root: Path = _ROOT) -> int | None:
    """Bytes, counting caches of files as free, or None where the system does not tell; `root`: where /proc and /sys lie."""
    limits = [free for group in _groups(root) if (free := _free_of(group)) is not None]
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        pass
    return min(limits, default=None)


def _groups(root: Path) -> Iterator[Path]:
    """The control groups that count this process' memory, innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, controllers, name in (line.split(":", 2) for line in lines):
        if controllers not in ("", "memory"):
            continue
        mounted = root / "sys/fs/cgroup" / controllers
        group = mounted / name.lstrip("/")
        yield from (each for each in (group, *group.parents) if each == mounted or mounted in each.parents)


def _free_of(group: Path) -> int | None:
    """None where the group sets no limit."""
    for limit, used, cache in (
        ("memory.max", "memory.current", ("active_file", "inactive_file")),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    ):
        try:
            most, taken = (group / limit).read_text().strip(), int((group / used).read_text())
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if most != "max" and int(most) < _NO_LIMIT:
            return max(int(most) - taken + sum(int(counts.get(name, 0)) for name in cache), 0)
    return None
