"""The processes of a job, the nodes they run on, and whom to blame for those that do not answer."""

import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from hybrid_megatron import platform


@dataclass(frozen=True)
class Member:
    """One process."""

    rank: int
    local_rank: int
    node: str
    """See `platform.node_name`."""


def this_member() -> Member:
    return Member(int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0")), platform.node_name())


@dataclass(frozen=True)
class Job:
    members: list[Member]
    """By rank."""

    @property
    def size(self) -> int:
        return len(self.members)

    @cached_property
    def ranks(self) -> dict[str, list[int]]:
        """Ranks of each node, nodes in the order of their first ranks."""
        found: dict[str, list[int]] = {}
        for member in self.members:
            found.setdefault(member.node, []).append(member.rank)
        return found

    @property
    def nodes(self) -> list[str]:
        return list(self.ranks)

    def node_of(self, rank: int) -> str:
        return self.members[rank].node

    def nodes_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.node_of(rank) for rank in ranks))

    def leads(self, rank: int) -> bool:
        """Whether this rank speaks for its node."""
        return self.ranks[self.node_of(rank)][0] == rank

    def of_nodes(self, by_rank: list) -> dict:
        """What the first rank of each node has, by node."""
        return {node: by_rank[ranks[0]] for node, ranks in self.ranks.items()}

    def place(self, rank: int, what: str = "GPU") -> str:
        """`rank 11 (GPU 3 of node2)`: names a culprit."""
        member = self.members[rank]
        return f"rank {rank} ({what} {member.local_rank} of {member.node})"


def nodes_of_silent(silent: list[int], known: list[Member], allocation: list[str]) -> tuple[str, ...]:
    """The nodes of ranks that do not answer. `known`: members that have said where they are; `allocation`: all nodes of the Slurm job.

    The node of a rank that has never answered is its neighbours', by number, and if none of these has answered either, any node of the
    allocation that nobody has answered from.
    """
    per_node = max((member.local_rank for member in known), default=0) + 1
    node_of = {member.rank: member.node for member in known}
    block = {member.rank // per_node: member.node for member in known}
    found = {node_of.get(rank) or block.get(rank // per_node) for rank in silent}
    if None in found:
        found = found - {None} | set(allocation) - set(block.values())
    return tuple(sorted(found))


def nodes_of_allocation() -> list[str]:
    """Node names of the Slurm job around this process; none outside of one."""
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        return []
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []
