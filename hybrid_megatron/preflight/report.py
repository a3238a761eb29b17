"""All findings of one preflight: for people, as numbers, and for the batch script."""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hybrid_megatron.preflight.finding import EXIT_CODES, Finding, Level, bad_nodes, worst
from hybrid_megatron.preflight.job import Job

VERDICT = "HYBRID_MEGATRON_PREFLIGHT"
BAD_NODES = "HYBRID_MEGATRON_BAD_NODES"


@dataclass
class Report:
    """Filled as the checks go on; every rank has the same one at the end, but for its seconds."""

    recipe: str
    job: Job | None = None
    findings: list[Finding] = field(default_factory=list)
    measured: list[dict] = field(default_factory=list)
    """By rank: node, device, and what the sniff found."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By part, and `in all`, counted from the start of the process."""
    speaker: int = 0
    """The rank that prints it: the lowest that answers."""
    stuck: bool = False
    """A thread of this process never ends."""

    @property
    def level(self) -> Level:
        return worst(self.findings)

    @property
    def code(self) -> int:
        """0: go. 2: a user's mistake. 3: bad nodes. 1: it could not be found out; trying again may help."""
        return EXIT_CODES[self.level]

    @property
    def bad_nodes(self) -> list[str]:
        return bad_nodes(self.findings)

    def reasons(self) -> list[Finding]:
        """What the verdict rests on."""
        return [finding for finding in self.findings if finding.level == self.level and finding.level > Level.WARNING]


def as_text(report: Report) -> str:
    """A line for each finding that is not fine, the worst first; one for all that is; what was measured; the verdict."""
    job = report.job
    lines = [_line("preflight", report.recipe + (f", {_count(job.size, 'process')} on {', '.join(job.nodes)}" if job else ""))]
    loud = sorted((each for each in report.findings if each.level > Level.FINE), key=lambda each: -each.level)
    lines += [_line(str(each.level), each.sentence) for each in loud]
    quiet = [each for each in report.findings if each.level == Level.FINE]
    if quiet:
        lines.append(_line("fine", ", ".join(dict.fromkeys(each.check for each in quiet))))
    lines += [_line("measured", each.sentence) for each in quiet if each.check in ("speed", "all-reduce")]
    parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in report.seconds.items() if part != "in all")
    lines.append(_line("took", f"{report.seconds.get('in all', 0.0):.1f} s: {parts}"))
    return "\n".join([*lines, _line("verdict", verdict_in_words(report))])


def verdict_in_words(report: Report) -> str:
    if report.level == Level.BAD_NODE:
        return f"bad nodes: {', '.join(report.bad_nodes)}"
    return {Level.REFUSED: "refused: this would fail on any node", Level.FAILED: "not found out; try again"}.get(report.level, "ok")


def as_dict(report: Report) -> dict:
    """Everything, for --json: `verdict` as in the batch script's file, `exit_code`, `bad_nodes`, `findings`, `measured`, `seconds`."""
    return {
        "recipe": report.recipe,
        "verdict": verdict(report),
        "exit_code": report.code,
        "bad_nodes": report.bad_nodes,
        "ranks": report.job.ranks if report.job else {},
        "findings": [asdict(each) | {"level": str(each.level)} for each in report.findings],
        "measured": report.measured,
        "seconds": report.seconds,
    }


def verdict(report: Report) -> str:
    """One line: `ok`, `bad_nodes`, `refused SENTENCE` or `failed SENTENCE`."""
    sentences = "; ".join(" ".join(each.sentence.split()) for each in report.reasons())
    word = {Level.REFUSED: "refused", Level.BAD_NODE: "bad_nodes", Level.FAILED: "failed"}.get(report.level, "ok")
    return f"{word} {sentences}" if word in ("refused", "failed") else word


def forget_verdict() -> None:
    """Before anything else: what an earlier preflight wrote must not be taken for this one's."""
    if VERDICT in os.environ:
        Path(os.environ[VERDICT]).unlink(missing_ok=True)


def write_verdict(report: Report) -> None:
    """Into the files that the environment names, if it does."""
    if BAD_NODES in os.environ and report.level == Level.BAD_NODE:
        _put(Path(os.environ[BAD_NODES]), "".join(f"{node}\n" for node in report.bad_nodes))
    if VERDICT in os.environ:
        _put(Path(os.environ[VERDICT]), verdict(report) + "\n")


def _put(file: Path, text: str) -> None:
    new = file.with_name(f".{file.name}.new")
    new.write_text(text)
    new.replace(file)


def _line(what: str, text: str) -> str:
    return f"{what:<11}{text}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 'es'}"
