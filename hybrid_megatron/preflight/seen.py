"""Files that every node must see alike: missing on one node, of another size there, or on a disk that is the node's own.

What is wrong on all nodes is a user's mistake. What some nodes see and others do not is a mistake too if it lies on a node's own disk,
since no other node would see it either; if it lies on a file system that nodes share, those that do not see it are bad.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hybrid_megatron.preflight.agreement import has_majority, named, odd_ones
from hybrid_megatron.preflight.file_systems import FileSystem, file_system_of
from hybrid_megatron.preflight.finding import Finding, Level, fine


@dataclass(frozen=True)
class Seen:
    """What one node sees of it."""

    problem: str
    """Why it cannot be used there, in one sentence; empty if it can."""
    sizes: tuple[tuple[str, int], ...]
    """Its files and their bytes; -1 of one that is not there."""
    file_system: FileSystem
    identity: str = ""
    """Of its contents, where that is known without reading them."""
    remarks: tuple[str, ...] = ()
    """What is worth a warning."""


def see(place: Path, files: Iterable[Path], problem: str = "", identity: str = "", remarks: Iterable[str] = ()) -> Seen:
    sizes = tuple((str(file), file.stat().st_size if file.is_file() else -1) for file in files)
    return Seen(problem, sizes, file_system_of(place), identity, tuple(remarks))


def judge_seen(check: str, seen: dict[str, Seen], blamed: Level = Level.REFUSED) -> list[Finding]:
    """`blamed`: how bad it is if no node can use it."""
    findings = [Finding(check, Level.WARNING, remark) for remark in dict.fromkeys(text for each in seen.values() for text in each.remarks)]
    broken = [node for node, each in seen.items() if each.problem]
    if len(broken) == len(seen):
        return findings + [Finding(check, blamed, text) for text in dict.fromkeys(each.problem for each in seen.values())]
    whole = {node: each for node, each in seen.items() if not each.problem}
    shared = _shared(whole)
    if broken:
        found = f"{named(whole)} can use it, {named(broken)} cannot: {seen[broken[0]].problem}"
        findings.append(_partial(check, found, tuple(broken), whole, shared))
    usual, odd = odd_ones({node: (each.identity, each.sizes) for node, each in whole.items()})
    if odd:
        node, (_, sizes) = next(iter(odd.items()))
        file = next(((name, one, other) for (name, one), (_, other) in zip(usual[1], sizes) if one != other), None)
        difference = f"{file[0]} has {file[1]:,} bytes on most nodes and {file[2]:,} on {node}" if file else "its contents differ"
        found = f"{named(odd)} and the others do not see the same: {difference}"
        findings.append(_partial(check, found, tuple(odd), whole, shared and has_majority(dict.fromkeys(whole) | odd)))
    files = len(next(iter(whole.values())).sizes)
    on = f" on all {len(seen)} nodes" if len(seen) > 1 else ""
    return findings or [fine(check, f"{files} file{'s' if files != 1 else ''}, the same{on}" if files > 1 else f"seen{on}")]


def _shared(whole: dict[str, Seen]) -> bool:
    return all(each.file_system.network for each in whole.values())


def _partial(check: str, found: str, nodes: tuple[str, ...], whole: dict[str, Seen], shared: bool) -> Finding:
    if shared:
        return Finding(check, Level.BAD_NODE, found, "it lies on a file system that all nodes share", "look at its mount there", nodes)
    kind = next(iter(whole.values())).file_system.kind or "unknown"
    rule = f"it lies on a file system ({kind}) that may be one node's own, and all nodes must see it"
    return Finding(check, Level.REFUSED, found, rule, "put it on a shared file system, under the same path on all nodes")
