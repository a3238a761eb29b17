"""What was found, what follows from it for the job, and how that is told: to people, and to the batch script."""

import enum
import os
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hybrid_megatron.preflight.job import Job

VERDICT = "HYBRID_MEGATRON_PREFLIGHT"
BAD_NODES = "HYBRID_MEGATRON_BAD_NODES"


class Level(enum.IntEnum):
    """How bad a finding is, the worst last."""

    FINE = 0
    UNKNOWN = 1
    """Not examined, for the reason given."""
    WARNING = 2
    """The run can begin, but not as well as it might."""
    FAILED = 3
    """It cannot begin and nobody is to blame: trying again may help."""
    BAD_NODE = 4
    """It can begin, on other nodes."""
    REFUSED = 5
    """A user's mistake: the run would fail on any node."""


_WORDS = ("fine", "unexamined", "warning", "failed", "bad node", "refused")
_EXIT_CODES = {Level.FAILED: 1, Level.REFUSED: 2, Level.BAD_NODE: 3}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    level: Level
    found: str
    """What is so and where, the rule if there is one, and the way out."""
    nodes: tuple[str, ...] = ()
    """The bad ones, by name."""

    @property
    def sentence(self) -> str:
        return self.found if self.found.startswith(f"{self.check}=") else f"{self.check}: {self.found}"


@dataclass
class Report:
    """Filled as the checks go on; every rank has the same one at the end."""

    recipe: str
    job: Job | None = None
    findings: list[Finding] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """By part, counted from the start of this process."""
    speaker: int = 0
    """The rank that prints it: the lowest that answers."""
    stuck: bool = False
    """A process has a thread that never ends."""

    @property
    def level(self) -> Level:
        return max((finding.level for finding in self.findings), default=Level.FINE)

    @property
    def code(self) -> int:
        """0: go. 2: a user's mistake. 3: bad nodes. 1: it could not be found out; trying again may help."""
        return _EXIT_CODES.get(self.level, 0)

    @property
    def bad_nodes(self) -> list[str]:
        return bad_nodes(self.findings)

    @property
    def verdict(self) -> str:
        """One line: `ok`, `bad_nodes`, `refused SENTENCE` or `failed SENTENCE`."""
        sentences = "; ".join(" ".join(each.sentence.split()) for each in self.findings if each.level == self.level)
        return {1: f"failed {sentences}", 2: f"refused {sentences}", 3: "bad_nodes"}.get(self.code, "ok")

    def __str__(self) -> str:
        """The findings, the worst first; all that is fine in one line, but for what was measured; the verdict last."""
        where = f", {self.job.size} process{'es' if self.job.size > 1 else ''} on {named(self.job.nodes)}" if self.job else ""
        lines = [_line("preflight", f"{self.recipe}{where}")]
        lines += [_line(_WORDS[each.level], each.sentence) for each in sorted(self.findings, key=lambda each: -each.level) if each.level]
        quiet = [each for each in self.findings if each.level == Level.FINE]
        lines += [_line("measured", each.sentence) for each in quiet if each.check in ("speed", "all-reduce")]
        lines += [_line("fine", ", ".join(dict.fromkeys(each.check for each in quiet)))] if quiet else []
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items())
        lines.append(_line("took", f"{sum(self.seconds.values()):.1f} s: {parts}"))
        ok = "ok, as far as it was examined" if any(each.level == Level.UNKNOWN for each in self.findings) else "ok"
        words = {1: "not found out; try again", 2: "refused: this would fail on any node", 3: f"bad nodes: {', '.join(self.bad_nodes)}"}
        return "\n".join([*lines, _line("verdict", words.get(self.code, ok))])


def bad_nodes(findings: Iterable[Finding]) -> list[str]:
    """Names of all nodes that a finding calls bad, each once, in order."""
    return sorted({node for finding in findings if finding.level == Level.BAD_NODE for node in finding.nodes})


def forget_verdict() -> None:
    """Before anything else: what an earlier preflight wrote must not be taken for this one's."""
    for variable in (VERDICT, BAD_NODES):
        if variable in os.environ:
            Path(os.environ[variable]).unlink(missing_ok=True)


def write_verdict(report: Report) -> None:
    """Into the files that the environment names, if it does: torchrun makes 1 of every exit code."""
    if BAD_NODES in os.environ and report.code == 3:
        _put(Path(os.environ[BAD_NODES]), "".join(f"{node}\n" for node in report.bad_nodes))
    if VERDICT in os.environ:
        _put(Path(os.environ[VERDICT]), report.verdict + "\n")


def odd_ones[Value: Hashable](values: dict[str, Value]) -> tuple[Value, dict[str, Value]]:
    """What most have, and what the others have instead, by name. Without a majority the first one's counts as usual."""
    usual = Counter(values.values()).most_common(1)[0][0]  # of equally frequent ones the first met
    return usual, {name: value for name, value in values.items() if value != usual}


def named(names: Iterable[str]) -> str:
    """`node1, node2`; of many the first few."""
    names = list(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**28 else f"{count / 2**20:.1f} MiB"


def _put(file: Path, text: str) -> None:
    new = file.with_name(f".{file.name}.new")
    new.write_text(text)
    new.replace(file)


def _line(what: str, text: str) -> str:
    return f"{what:<11}{text}"
