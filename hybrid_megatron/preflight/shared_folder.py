"""The run folder between nodes: every node can write there, sees what another writes, and sees that another holds a lock.

Each node writes one small file with a name that no other preflight has, in the run folder or, where that does not exist yet, in the
folder it would be made in. The files are removed at the end, and what a killed preflight left is removed by a later one. Nothing else is
touched.
"""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hybrid_megatron.preflight.agreement import named, odd_ones
from hybrid_megatron.preflight.file_systems import FileSystem, existing_folder, file_system_of
from hybrid_megatron.preflight.finding import Finding, Level, fine

PREFIX = ".preflight-"
_LEFT_OVER_SECONDS = 600.0
"""Age at which a file of ours must be of a preflight that was killed."""
_SEEN_WITHIN_SECONDS = 10.0
SLOW_SECONDS = 1.0
"""How soon another node's file should be there."""
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}


@dataclass(frozen=True)
class Written:
    """What became of a node's own file."""

    folder: str
    file: str
    """Its path; empty if it could not be written."""
    problem: str
    file_system: FileSystem


@dataclass(frozen=True)
class Looked:
    """What a node sees of the others' files."""

    seconds: dict[str, float | None]
    """Until each node's file was there with its contents, by node; None if it did not come."""
    lock: str
    """The lock that the first node holds on its own file: `held`, `not seen`, `none` (the file system has no locks), `unknown`."""


class Probe:
    """This node's file; `open_probe` makes it."""

    def __init__(self, written: Written, held: IO | None):
        self.written, self.held = written, held

    def look(self, files: dict[str, str]) -> Looked:
        """At the files of all nodes, the first of which holds the lock; call it when all are written."""
        end = time.monotonic() + _SEEN_WITHIN_SECONDS
        seconds = {node: _await(Path(file), node, end) for node, file in files.items()}
        first = next(iter(files))
        return Looked(seconds, _try_lock(files[first]) if seconds[first] is not None else "unknown")


@contextlib.contextmanager
def open_probe(run_dir: Path, token: str, node: str, locks: bool) -> Iterator[Probe]:
    """Write this node's file, with the node's name in it, and remove it at the end. `locks`: hold a lock on it meanwhile."""
    folder = existing_folder(run_dir)
    file = folder / f"{PREFIX}{token}-{node.replace('/', '_')}"
    held = None
    try:
        try:
            held = open(file, "x")
            held.write(node)
            held.flush()
            os.fsync(held.fileno())
            written = Written(str(folder), str(file), "", file_system_of(folder))
            _remove_left_over(folder, file.stat().st_mtime)
        except OSError as error:
            written = Written(str(folder), "", error.strerror or str(error), file_system_of(folder))
        if locks and held is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Probe(written, held)
    finally:
        if held is not None:
            held.close()
            file.unlink(missing_ok=True)


def _remove_left_over(folder: Path, now: float) -> None:
    """`now`: by the file system's own clock, which need not be this node's."""
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another preflight removes it too
            if now - path.stat().st_mtime > _LEFT_OVER_SECONDS:
                path.unlink()


def _await(file: Path, node: str, end: float) -> float | None:
    """Seconds until a node's file is there with its contents."""
    began = time.monotonic()
    while True:
        with contextlib.suppress(OSError):
            if file.read_text() == node:
                return time.monotonic() - began
        if time.monotonic() > end:
            return None
        time.sleep(0.1)


def _try_lock(file: str) -> str:
    """Whether a lock is to be had that another holds. NFS wants the file open for writing."""
    try:
        with open(file, "r+") as mine:
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "not seen"
    except BlockingIOError:
        return "held"
    except OSError as error:
        return "none" if error.errno in _NO_LOCKS else "unknown"


def judge_written(run_dir: str, written: dict[str, Written]) -> list[Finding]:
    """Whether every node can write, in one and the same folder."""
    broken = [node for node, each in written.items() if each.problem]
    if broken:
        each = written[broken[0]]
        found = f"run_dir={run_dir}: {each.folder} cannot be written on {named(broken)} ({each.problem})"
        if len(broken) == len(written) or not each.file_system.network:
            return [Finding("run folder", Level.REFUSED, found, way_out="give another with run_dir=PATH")]
        return [Finding("run folder", Level.BAD_NODE, found, "the other nodes can", "look at its mount there", tuple(broken))]
    usual, odd = odd_ones({node: each.folder for node, each in written.items()})
    if odd:
        node, folder = next(iter(odd.items()))
        return [
            _not_shared(run_dir, f"the nearest folder that exists is {usual} on most nodes and {folder} on {node}", written, tuple(odd))
        ]
    on = f" on all {len(written)} nodes" if len(written) > 1 else ""
    return [fine("run folder", f"{usual} can be written{on}")]


def judge_looked(run_dir: str, written: dict[str, Written], looked: dict[str, Looked]) -> list[Finding]:
    """Whether nodes see each other's files and locks."""
    unseen = [(node, other) for node, each in looked.items() for other, seconds in each.seconds.items() if seconds is None]
    if unseen:
        pairs = named(f"{node} does not see {other}'s file" for node, other in unseen)
        lost = [node for node in looked if all(node in pair for pair in unseen)]
        return [_not_shared(run_dir, pairs, written, tuple(lost) if len(lost) == 1 else ())]
    findings = []
    slowest = max(seconds for each in looked.values() for seconds in each.seconds.values())
    if slowest > SLOW_SECONDS:
        found = f"run_dir={run_dir}: what one node writes another sees only after {slowest:.1f} s"
        findings.append(Finding("run folder", Level.WARNING, found, "caches of the network file system", "the run waits where it matters"))
    findings += _judge_locks(run_dir, next(iter(written.values())).file_system, looked)
    return findings


def _judge_locks(run_dir: str, file_system: FileSystem, looked: dict[str, Looked]) -> list[Finding]:
    kind = file_system.kind or "its file system"
    states = {node: each.lock for node, each in looked.items()}
    if set(states.values()) == {"held"}:
        return [fine("locks", f"a lock in the run folder is seen{f' on all {len(looked)} nodes' if len(looked) > 1 else ''}")]
    blind = [node for node, state in states.items() if state != "held"]
    if "none" in states.values():
        found = f"run_dir={run_dir}: {kind} has no locks on {named(blind)}"
    else:
        found = f"run_dir={run_dir}: a lock that {next(iter(looked))} holds is not seen on {named(blind)} ({kind})"
    rule = "so two jobs on different nodes are kept apart by the folder's lease alone, and after a node's death the next waits until it is stale"
    way_out = "locks that all nodes share come with NFS 4, or with Lustre mounted with -o flock"
    return [Finding("locks", Level.WARNING, found, rule, way_out)]


def _not_shared(run_dir: str, found: str, written: dict[str, Written], lost: tuple[str, ...]) -> Finding:
    found = f"run_dir={run_dir}: {found}"
    if lost and len(lost) * 2 < len(written) and all(each.file_system.network for node, each in written.items() if node not in lost):
        return Finding("run folder", Level.BAD_NODE, found, "all nodes must share it", f"look at its mount on {named(lost)}", lost)
    return Finding("run folder", Level.REFUSED, found, "all nodes must share it", "give another with run_dir=PATH on a shared file system")
