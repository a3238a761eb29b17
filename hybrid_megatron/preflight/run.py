"""The order of a preflight: who is there, the recipe, what each node finds and sees of the others, the sniff, the verdict."""

import time
from collections.abc import Callable
from dataclasses import replace

import psutil

from hybrid_megatron.preflight.exchange import Broken, Exchange, Silent, open_exchange
from hybrid_megatron.preflight.gpus import Device, of_one_kind
from hybrid_megatron.preflight.job import Job, nodes_of_allocation, nodes_of_silent, this_member
from hybrid_megatron.preflight.links import judge_links, measure_links
from hybrid_megatron.preflight.nodes import NODE_FACTS, look_at_nodes
from hybrid_megatron.preflight.recipe import judge_recipe, read_recipe
from hybrid_megatron.preflight.report import Finding, Level, Report, bad_nodes, named
from hybrid_megatron.preflight.speed import gather_speed, judge_speed

WAIT_SECONDS = 120.0
"""How long processes wait for one that does not answer: nodes that read Python's packages from a cold disk start a minute apart."""
LINK_SECONDS = 60.0
"""Within which all all-reduces must end; they take some 5 s."""
AGAIN_SECONDS = 10.0
"""How long after a node was found bad it is looked at again: a process of the job before takes so long to leave a GPU, a network file
system to see what was written elsewhere, another job's burst on the network to pass."""


def preflight(words: list[str], tell: Callable[[Report], None]) -> Report:
    """Examine a recipe, typed as for training, on the processes of this job. Collective; raises OSError if the others cannot be reached.

    Every rank returns a report with the same findings, once one of them has told it.
    """
    report = Report(words[0])
    watch = _Stopwatch(report.seconds)
    with open_exchange(WAIT_SECONDS) as exchange:
        try:
            _examine(words, exchange, report, watch)
        except Silent as silent:
            report.speaker = min(set(range(exchange.size)) - set(silent.ranks))
            report.findings.append(_judge_silent(silent, exchange))
        except Broken as broken:
            report.findings.append(_judge_broken(broken, report.job))
        watch.note("the rest")
        if exchange.rank == report.speaker:
            tell(report)
            exchange.tell()
        else:
            exchange.told()
    return report


def _examine(words: list[str], exchange: Exchange, report: Report, watch: "_Stopwatch") -> None:
    """Fills the report. Stops early where what comes next would make no sense or keep a user waiting for what is known."""
    job = report.job = Job(exchange.of_all("who is there", this_member))
    watch.note("waiting")
    read = exchange.of_all("recipe", lambda: read_recipe(words, exchange.rank, job.size))
    report.findings += judge_recipe(job, read)
    if report.level > Level.WARNING:
        return
    devices: list[Device] = []
    report.findings += _twice(report, lambda: look_at_nodes(words, read[exchange.rank].config, exchange, job, devices))
    watch.note("nodes")
    if report.level == Level.REFUSED or not of_one_kind(devices):
        return
    report.findings += _twice(report, lambda: judge_speed(job, devices, exchange.of_all("speed", gather_speed)))
    watch.note("speed")
    report.findings += _twice(report, lambda: _look_at_links(exchange, job, devices[0].name, report))
    watch.note("all-reduce")


def _twice(report: Report, look: Callable[[], list[Finding]]) -> list[Finding]:
    """What `look` finds, but no node is bad that is not so in two looks: one that was merely unlucky once is not given up."""
    first = look()
    if not bad_nodes(first) or report.stuck:
        return first
    time.sleep(AGAIN_SECONDS)
    second = look()
    findings = []
    for finding in second:
        if finding.level == Level.BAD_NODE and not set(finding.nodes) <= set(bad_nodes(first)):
            finding = replace(finding, level=Level.WARNING, found=f"{finding.found}; not so {AGAIN_SECONDS:.0f} s before", nodes=())
        findings.append(finding)
    for finding in first:
        if finding.level == Level.BAD_NODE and not set(finding.nodes) & set(bad_nodes(second)):
            found = f"{finding.found}; not so {AGAIN_SECONDS:.0f} s later"
            findings.append(replace(finding, level=Level.WARNING, found=found, nodes=()))
    return findings


def _look_at_links(exchange: Exchange, job: Job, device: str, report: Report) -> list[Finding]:
    if job.size == 1:
        alone = "one process; torchrun --nproc-per-node N -m launch preflight RECIPE measures it among N"
        return [Finding("all-reduce", Level.UNKNOWN, alone)]
    links = exchange.of_all("all-reduce", lambda: measure_links(job, exchange, exchange.rounds, LINK_SECONDS))
    report.stuck = any(each.stuck for each in links)  # then another look would hang too
    return judge_links(job, links, device)


def _judge_silent(silent: Silent, exchange: Exchange) -> Finding:
    nodes = nodes_of_silent(silent.ranks, exchange.heard_first(), nodes_of_allocation())
    who = f"{'ranks' if silent.ranks[1:] else 'rank'} {named(map(str, silent.ranks))}{f' of {named(nodes)}' if nodes else ''}"
    found = f"{who} did not answer within {exchange.seconds:.0f} s when asked for: {silent.topic}"
    usual = "a dead GPU, a disk that is not mounted or a broken network are the usual reasons"
    return Finding("ranks", Level.BAD_NODE if nodes else Level.FAILED, f"{found}; {usual}", nodes)


def _judge_broken(broken: Broken, job: Job) -> Finding:
    """Where all that were asked fail alike, no other node would do better."""
    asked = [rank for rank in range(job.size) if broken.topic != NODE_FACTS or job.leads(rank)]
    rank, problem = next(iter(broken.problems.items()))
    more = f"; and {len(broken.problems) - 1} more ranks" if len(broken.problems) > 1 else ""
    found = f"{job.place(rank, 'process')}: {problem}{more}"
    if len(broken.problems) < len(asked):
        return Finding(broken.topic, Level.BAD_NODE, found, job.nodes_of(broken.problems))
    return Finding(broken.topic, Level.FAILED, found)


class _Stopwatch:
    """Seconds by part, counted from the start of the process."""

    def __init__(self, seconds: dict[str, float]):
        self.seconds, self.last = seconds, time.time()
        self.seconds["start"] = self.last - psutil.Process().create_time()

    def note(self, part: str) -> None:
        now = time.time()
        self.seconds[part], self.last = now - self.last, now
