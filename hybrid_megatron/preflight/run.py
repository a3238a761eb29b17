"""The order of a preflight: who is there, the recipe, what every node finds, what nodes see of each other, the sniff, the verdict."""

import contextlib
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import psutil

from hybrid_megatron.checkpoint.save_load import checkpoint_bytes
from hybrid_megatron.config.megatron import parameter_dtype
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.model.accounting import account
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.planning.layout import Layout
from hybrid_megatron.planning.memory import peak_memory
from hybrid_megatron.preflight.checkpoints import Origin, judge_origin, permanent_interval
from hybrid_megatron.preflight.clocks import judge_clocks, measure_offset
from hybrid_megatron.preflight.disk import checkpoint_need, judge_run_space, judge_spaces
from hybrid_megatron.preflight.environment import judge_surroundings
from hybrid_megatron.preflight.exchange import Exchange, Silent, open_exchange
from hybrid_megatron.preflight.facts import NodeFacts, RankFacts, attempt, gather_node, gather_rank, gather_run
from hybrid_megatron.preflight.finding import Finding, Level
from hybrid_megatron.preflight.gpu_health import judge_health
from hybrid_megatron.preflight.gpus import judge_gpus, judge_memory
from hybrid_megatron.preflight.job import Job, nodes_of_allocation, this_member
from hybrid_megatron.preflight.links import judge_links, measure_links
from hybrid_megatron.preflight.network import judge_network, judge_wandb
from hybrid_megatron.preflight.recipe import judge_recipe, read_recipe
from hybrid_megatron.preflight.report import Report
from hybrid_megatron.preflight.seen import judge_seen
from hybrid_megatron.preflight.shared_folder import judge_looked, judge_written, open_probe
from hybrid_megatron.preflight.silent import judge_silent
from hybrid_megatron.preflight.speed import gather_speed, judge_speed
from hybrid_megatron.preflight.versions import judge_software

WAIT_SECONDS = 120.0
"""How long processes wait for one that does not answer: nodes that read Python's packages from a cold disk start a minute apart."""
LINK_SECONDS = 60.0
"""Within which all all-reduces must end."""
_HEARD_SECONDS = 10.0


def preflight(words: list[str], tell: Callable[[Report], None], wait_seconds: float = WAIT_SECONDS) -> Report:
    """Examine a recipe, typed as for training, on the processes of this job. Collective; raises OSError if the others cannot be reached.

    Every rank returns a report with the same findings, once the first one has told it.
    """
    report = Report(words[0])
    watch = _Stopwatch(report.seconds)
    with _ended_by_sigterm(), open_exchange(wait_seconds) as exchange:
        try:
            _examine(words, exchange, report, watch)
        except Silent as silent:
            report.speaker = min(set(range(exchange.size)) - set(silent.ranks))
            members = list(exchange.heard("hello").values())
            report.findings.append(judge_silent(silent.ranks, members, nodes_of_allocation(), silent.topic, wait_seconds))
        watch.end()
        if exchange.rank == report.speaker:
            tell(report)
            exchange.tell("told", None)
        else:  # torchrun ends all with the first that ends badly: not before the one that speaks
            with contextlib.suppress(TimeoutError):
                exchange.told("told", _HEARD_SECONDS)
    return report


def _examine(words: list[str], exchange: Exchange, report: Report, watch: "_Stopwatch") -> None:
    """Fills the report. Stops early where what comes next would make no sense or keep a user waiting for what is known."""
    job = report.job = Job(exchange.of_all("hello", this_member()))
    watch.note("waiting")

    read = exchange.of_all("recipe", read_recipe(words, exchange.rank, job.size))
    report.findings += judge_recipe(job, read)
    config, origin = read[exchange.rank].config, read[0].origin
    if report.level > Level.WARNING:
        return
    watch.note("recipe")

    facts = _examine_nodes(words, exchange, job, config, origin, report, watch)
    if facts is None or report.level == Level.REFUSED or not all(each.device.usable for each in facts):
        return
    devices = [each.device for each in facts]
    speeds = exchange.of_all("speed", attempt(gather_speed))
    watch.note("speed")
    if _add_failures(report, job, "speed", [problem for _, problem in speeds]):
        return
    report.findings += judge_speed(job, devices, [speed for speed, _ in speeds])
    report.measured = [
        {"rank": rank, "node": job.node_of(rank), "device": asdict(device), "speed": asdict(speed)}
        for rank, (device, (speed, _)) in enumerate(zip(devices, speeds))
    ]
    if job.size > 1:
        mine = measure_links(job, exchange, LINK_SECONDS)
        report.stuck = mine.stuck
        links = exchange.of_all("links", mine)
        for each, link in zip(report.measured, links):
            each["all_reduce_gbytes_per_second"] = link.gbytes
        report.findings += judge_links(job, links, devices[0].name)
        watch.note("all-reduce")


def _examine_nodes(
    words: list[str], exchange: Exchange, job: Job, config: RunConfig, origin: Origin, report: Report, watch: "_Stopwatch"
) -> list[RankFacts] | None:
    """Facts of all ranks and nodes, and what nodes see of each other; the first, or None if a rank could not find out its own."""
    rank = exchange.rank
    node, leads, processes = job.node_of(rank), job.first_of_node(rank), len(job.ranks[job.node_of(rank)])
    [token, *_] = exchange.of_all("token", secrets.token_hex(4))
    with contextlib.ExitStack() as files:
        probe = files.enter_context(open_probe(Path(config.run_dir), token, node, locks=rank == 0)) if leads else None

        def gather() -> RankFacts:
            mine = gather_rank(config, job.members[rank].local_rank, processes)
            of_node = gather_node(config, words, origin, processes, probe.written) if probe else None
            return RankFacts(mine.device, mine.pair_problem, of_node, gather_run(config) if rank == 0 else None)

        answers = exchange.of_all("facts", attempt(gather))
        watch.note("facts")
        if _add_failures(report, job, "facts", [problem for _, problem in answers]):
            return None
        facts = [each for each, _ in answers]
        of_nodes: dict[str, NodeFacts] = {name: each.node for name, each in job.of_nodes(facts).items()}
        report.findings += _judge_facts(config, origin, job, facts, of_nodes)
        written = {name: each.written for name, each in of_nodes.items()}
        unwritten = judge_written(config.run_dir, written)
        report.findings += unwritten
        if not any(each.problem for each in written.values()):
            looked = exchange.of_all("looked", probe.look({name: each.file for name, each in written.items()}) if probe else None)
            report.findings += judge_looked(config.run_dir, written, job.of_nodes(looked))
    offsets = exchange.of_all("clock", measure_offset(exchange, job))
    report.findings += judge_clocks(job.of_nodes(offsets))
    watch.note("between nodes")
    return facts


def _judge_facts(config: RunConfig, origin: Origin, job: Job, facts: list[RankFacts], nodes: dict[str, NodeFacts]) -> list[Finding]:
    devices, run = [each.device for each in facts], facts[0].run
    plan = plan_layers(config)
    pairs = {
        node: next((facts[rank].pair_problem for rank in ranks if facts[rank].pair_problem), None) for node, ranks in job.ranks.items()
    }
    findings = judge_software({node: each.software for node, each in nodes.items()}, pairs)
    gpus = judge_gpus(job, devices, run.gpus_promised)
    findings += gpus
    if max(each.level for each in gpus) <= Level.WARNING:
        findings += judge_memory(job, devices, peak_memory(Layout(config, plan, job.size)))
    uuids = {node: {devices[rank].uuid for rank in ranks} - {""} for node, ranks in job.ranks.items()}
    findings += judge_health({node: each.health for node, each in nodes.items()}, uuids)
    findings += judge_spaces({node: each.spaces for node, each in nodes.items()}, devices[0].is_cuda)
    for check in next(iter(nodes.values())).data:
        findings += judge_seen(check, {node: each.data[check] for node, each in nodes.items()})
    findings += judge_origin(origin, {node: each.origin for node, each in nodes.items()})
    one = checkpoint_bytes(account(config, plan).total_params, parameter_dtype(config).itemsize)
    interval = permanent_interval(config)
    permanent = config.num_steps // interval - origin.steps // interval if interval else 0
    findings += judge_run_space(run.space, checkpoint_need(one, config.checkpoint.keep_last, origin.existing, permanent))
    findings += judge_surroundings({node: each.surroundings for node, each in nodes.items()})
    findings += judge_network({node: each.network for node, each in nodes.items()})
    return findings + judge_wandb(run.wandb, run.wandb_problem, job.nodes[0])


def _add_failures(report: Report, job: Job, part: str, problems: list[str]) -> bool:
    """What ranks could not find out. On every node: something that no other node would do better."""
    failed = [rank for rank, problem in enumerate(problems) if problem]
    nodes = tuple(dict.fromkeys(job.node_of(rank) for rank in failed))
    if failed:
        found = f"{job.place(failed[0])}: {problems[failed[0]]}" + (f"; and {len(failed) - 1} more ranks" if failed[1:] else "")
        everywhere = len(nodes) == len(job.nodes) and len(failed) == job.size
        report.findings.append(Finding(part, Level.FAILED if everywhere else Level.BAD_NODE, found, nodes=() if everywhere else nodes))
    return bool(failed)


class _Stopwatch:
    """Seconds of each part, into a dict; the first part is what the process did before."""

    def __init__(self, seconds: dict[str, float]):
        self.seconds = seconds
        self.started = psutil.Process().create_time()
        self.last = time.time()
        self.seconds["start"] = self.last - self.started

    def note(self, part: str) -> None:
        now = time.time()
        self.seconds[part], self.last = now - self.last, now

    def end(self) -> None:
        self.seconds["in all"] = time.time() - self.started


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the process as an exception does, so that no file is left behind."""

    def end(number, _frame):
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
