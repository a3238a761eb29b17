"""The processes of a job and the nodes they run on."""

import os
import socket
import subprocess
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Member:
    """One process."""

    rank: int
    local_rank: int
    node: str


def node_name() -> str:
    """What Slurm calls this node, since that is what `--exclude` takes; elsewhere its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def this_member() -> Member:
    return Member(int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0")), node_name())


class Job:
    """All members, by rank."""

    def __init__(self, members: list[Member]):
        self.members = members

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

    def first_of_node(self, rank: int) -> bool:
        """Whether this rank speaks for its node."""
        return self.ranks[self.node_of(rank)][0] == rank

    def node_of(self, rank: int) -> str:
        return self.members[rank].node

    def place(self, rank: int, what: str = "process") -> str:
        """`rank 11 (GPU 3 of node2)`: names a culprit."""
        member = self.members[rank]
        return f"rank {rank} ({what} {member.local_rank} of {member.node})"

    def of_nodes(self, by_rank: list) -> dict:
        """What the first rank of each node has, by node."""
        return {node: by_rank[ranks[0]] for node, ranks in self.ranks.items()}


def nodes_of_allocation(seconds: float = 5.0) -> list[str]:
    """Node names of the Slurm job around this process; none outside of one."""
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        return []
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []
