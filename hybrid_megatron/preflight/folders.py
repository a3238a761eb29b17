"""Folders to write into: the run's, which all nodes share, with room for its checkpoints, and each node's own for caches.

Every node writes a small file with a name that no other preflight has, in the run folder or, where that does not exist yet, in the folder
it would be made in, and looks for the others'. They are removed at the end; what a killed preflight left is removed by a later one.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hybrid_megatron.preflight.files import existing_folder, is_shared
from hybrid_megatron.preflight.report import Finding, Level, named, size

PREFIX = ".preflight-"
_LEFT_OVER_SECONDS = 600.0
"""Age at which a file of ours must be of a preflight that was killed."""
SEEN_WITHIN_SECONDS = 10.0
"""How soon another node's file must be there: longer than NFS keeps an old listing of a folder that changes (3 s by default)."""
LEAST = {"/tmp": 2**28, "/dev/shm": 2**30, "Triton cache": 2**30}
"""Bytes below which a node's own folders are said to be short of room: NCCL moves data between processes through /dev/shm, Triton keeps
every kernel it compiles, and /tmp is everybody's."""
_WAY_OUT = {
    "/tmp": "clean it up, or set TMPDIR to another folder of the node",
    "/dev/shm": "clean it up; in a container, start it with a larger one (--shm-size)",
    "Triton cache": "set TRITON_CACHE_DIR to a folder of the node with room",
}


@dataclass(frozen=True)
class Folder:
    """A folder, or the nearest existing one above it, as a node sees it."""

    path: str
    free: int
    shared: bool
    problem: str
    """Why it cannot be written; empty if it can."""
    file: str = ""
    """Of the run folder: what this node has written there."""


def gather_folders() -> dict[str, Folder]:
    """A node's own, by the names in `LEAST`."""
    triton = Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"  # by Triton's own rules
    paths = {
        "/tmp": os.environ.get("TMPDIR") or "/tmp",
        "/dev/shm": "/dev/shm",
        "Triton cache": os.environ.get("TRITON_CACHE_DIR") or triton,
    }
    return {what: _own_folder(existing_folder(Path(path))) for what, path in paths.items()}


def _own_folder(folder: Path) -> Folder:
    problem = "" if os.access(folder, os.W_OK) else "no permission, or read-only"
    return Folder(str(folder), shutil.disk_usage(folder).free, is_shared(folder), problem)


def judge_folders(folders: dict[str, dict[str, Folder]], cuda: bool) -> list[Finding]:
    """`folders`: of each node. On CPUs nothing is compiled by Triton and nothing goes through NCCL."""
    findings = []
    for what, least in LEAST.items():
        here = {node: each[what] for node, each in folders.items()} if cuda or what == "/tmp" else {}
        closed = [node for node, folder in here.items() if folder.problem]
        if closed:
            level = Level.BAD_NODE if len(closed) < len(here) else Level.REFUSED
            found = f"{what}: {here[closed[0]].path} cannot be written on {named(closed)} ({here[closed[0]].problem}); {_WAY_OUT[what]}"
            findings.append(Finding("disk", level, found, tuple(closed) if level == Level.BAD_NODE else ()))
        short = [node for node, folder in here.items() if folder.free < least]
        if short:
            found = (
                f"{what}: {size(min(here[node].free for node in short))} free on {named(short)}, less than {size(least)}; {_WAY_OUT[what]}"
            )
            findings.append(Finding("disk", Level.WARNING, found))
    caches = [each["Triton cache"] for each in folders.values()]
    if cuda and any(cache.shared for cache in caches):
        found = f"Triton compiles into {caches[0].path}, which nodes share: ranks meet stale file handles there and wait for minutes"
        findings.append(Finding("disk", Level.WARNING, f"{found}; set TRITON_CACHE_DIR to a folder of the node, as slurm/node.sh does"))
    free = min(each["/tmp"].free for each in folders.values())
    return findings or [Finding("disk", Level.FINE, f"{size(free)} free in /tmp")]


@contextlib.contextmanager
def open_run_folder(run_dir: Path, token: str, node: str) -> Iterator[Folder]:
    """Write this node's file, with the node's name in it, and remove it at the end."""
    folder = existing_folder(run_dir)
    file = folder / f"{PREFIX}{token}-{node.replace('/', '_')}"
    problem = ""
    try:
        try:
            file.write_text(node)
            _remove_left_over(folder, file.stat().st_mtime)
        except OSError as error:
            problem = error.strerror or str(error)
        yield Folder(str(folder), shutil.disk_usage(folder).free, is_shared(folder), problem, str(file))
    finally:
        with contextlib.suppress(OSError):
            file.unlink()


def _remove_left_over(folder: Path, now: float) -> None:
    """`now`: by the file system's own clock, which need not be this node's."""
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another preflight removes it too
            if now - path.stat().st_mtime > _LEFT_OVER_SECONDS:
                path.unlink()


def look_for(files: dict[str, str]) -> list[str]:
    """Nodes whose file does not come to be seen here, or not with its contents. Call it when all are written."""
    end = time.monotonic() + SEEN_WITHIN_SECONDS
    return [node for node, file in files.items() if not _appears(Path(file), node, end)]


def _appears(file: Path, contents: str, end: float) -> bool:
    while True:
        with contextlib.suppress(OSError):
            if file.read_text() == contents:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)


def judge_run_folder(run_dir: str, folders: dict[str, Folder], unseen: dict[str, list[str]]) -> list[Finding]:
    """`unseen`: the nodes whose file each node does not see; only of those that could write."""
    closed = [node for node, each in folders.items() if each.problem]
    able = [node for node in folders if node not in closed]
    if closed:
        each = folders[closed[0]]
        found = f"run_dir={run_dir}: {each.path} cannot be written on {named(closed)} ({each.problem})"
        if able and all(folders[node].shared for node in able):
            return [Finding("run folder", Level.BAD_NODE, f"{found}; the other nodes can, so look at its mount there", tuple(closed))]
        return [Finding("run folder", Level.REFUSED, f"{found}; give another with run_dir=PATH")]
    pairs = [(node, other) for node, others in unseen.items() for other in others]
    if pairs:
        found = f"run_dir={run_dir}: " + named(f"{node} does not see what {other} writes there" for node, other in pairs)
        lost = [node for node in folders if not folders[node].shared]  # where it is not mounted, the path is on the node's own disk
        if not lost and len(folders) > 2:
            lost = [node for node in folders if all(node in pair for pair in pairs)]
        if lost and len(lost) < len(folders):
            return [Finding("run folder", Level.BAD_NODE, f"{found}; look at its mount on {named(lost)}", tuple(lost))]
        return [Finding("run folder", Level.REFUSED, f"{found}; give another with run_dir=PATH on a file system that all nodes share")]
    return [Finding("run folder", Level.FINE, f"can be written, and what one node writes the others see ({len(folders)} in all)")]


def judge_room(folder: Folder, checkpoint: int, rolling: int, permanent: int) -> list[Finding]:
    """Of the run folder. `checkpoint`: bytes of one; `rolling`: how many more must fit at once; `permanent`: how many stay for ever, over
    the rest of the run. Quotas are not seen: `free` is what the file system has."""
    where = f"{folder.path} has {size(folder.free)} free and a checkpoint takes {size(checkpoint)}"
    if folder.free < rolling * checkpoint:
        way_out = "free some, lower checkpoint.keep_last, or give another run_dir=PATH"
        return [Finding("room for checkpoints", Level.REFUSED, f"{where}, so the {rolling} that must fit do not; {way_out}")]
    if folder.free < (rolling + permanent) * checkpoint:
        found = f"{where}, so {rolling} fit, and not the {permanent} permanent ones besides; move finished ones away in time"
        return [Finding("room for checkpoints", Level.WARNING, found)]
    return [Finding("room for checkpoints", Level.FINE, where)]
