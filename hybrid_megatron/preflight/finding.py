"""What a check found, and what follows from it for the job."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Level(enum.IntEnum):
    """How bad a finding is, the worst last."""

    FINE = 0
    WARNING = 1
    """The run can begin, but not as well as it might."""
    FAILED = 2
    """It cannot begin and nobody is to blame: trying again may help."""
    BAD_NODE = 3
    """It can begin, on other nodes."""
    REFUSED = 4
    """A user's mistake: the run would fail on any node."""

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


EXIT_CODES = {Level.FINE: 0, Level.WARNING: 0, Level.FAILED: 1, Level.BAD_NODE: 3, Level.REFUSED: 2}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    level: Level
    found: str
    """What is so, with the value and where."""
    rule: str = ""
    """What should be so, and why, where `found` does not say it."""
    way_out: str = ""
    nodes: tuple[str, ...] = ()
    """The bad ones, by name."""

    @property
    def sentence(self) -> str:
        return f"{self.check}: " + "; ".join(part for part in (self.found, self.rule, self.way_out) if part)


def fine(check: str, found: str) -> Finding:
    return Finding(check, Level.FINE, found)


def worst(findings: Iterable[Finding]) -> Level:
    return max((finding.level for finding in findings), default=Level.FINE)


def bad_nodes(findings: Iterable[Finding]) -> list[str]:
    """Names of all nodes that a finding calls bad, each once, in order."""
    return sorted({node for finding in findings if finding.level == Level.BAD_NODE for node in finding.nodes})
