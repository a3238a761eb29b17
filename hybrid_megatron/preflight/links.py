"""How fast GPUs exchange data: an all-reduce within each node, between neighbouring nodes where there are three or more, and over all.

The order finds the culprit: what is slow or hangs within a node is that node's, and of the pairs of nodes in a ring a slow node spoils both
of its own. All of it runs in a thread, since a collective that a rank does not enter never ends; after `seconds` the main thread says how
far it came. A process whose thread is stuck must be left by os._exit.
"""

import statistics
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from hybrid_megatron import platform
from hybrid_megatron.preflight.exchange import Exchange
from hybrid_megatron.preflight.finding import Finding, Level, fine
from hybrid_megatron.preflight.job import Job

SLOW = 0.7
"""Least share of the median of nodes or pairs of nodes."""
NVLINK_LEAST = 100.0
"""GB/s within a node below which GPUs that have NVLink do not use it; PCIe gives some 20."""
NETWORK_LEAST = 5.0
"""GB/s a GPU between nodes below which the network is no InfiniBand: 40 Gbit/s."""
_NVLINK = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB")
_NETWORK_WAY_OUT = "NCCL_DEBUG=INFO says what NCCL takes; NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose it"


@dataclass(frozen=True)
class Group:
    """Ranks that are measured together."""

    name: str
    """As in: an all-reduce ... takes long."""
    nodes: tuple[str, ...]
    ranks: list[int]


@dataclass
class Links:
    """What one rank measured: bus bandwidth in GB/s, 2 (n - 1) / n times the bytes over the time, by the name of the group."""

    gbytes: dict[str, float] = field(default_factory=dict)
    at: str = ""
    """The group it is in, or was in when it stuck or failed; empty before the first."""
    problem: str = ""
    """Why it failed."""
    done: bool = False

    @property
    def stuck(self) -> bool:
        return not self.done and not self.problem


def groups_of(job: Job) -> list[Group]:
    """In the order in which they are measured: nodes, edges of a ring of nodes, all nodes."""
    groups = [Group(f"within {node}", (node,), ranks) for node, ranks in job.ranks.items() if len(ranks) > 1]
    nodes = job.nodes
    if len(nodes) > 2:
        edges = [(nodes[i], nodes[(i + 1) % len(nodes)]) for i in range(len(nodes))]
        # every second edge first: those have no node in common and run at the same time
        groups += [Group(f"between {a} and {b}", (a, b), sorted(job.ranks[a] + job.ranks[b])) for a, b in edges[::2] + edges[1::2]]
    if len(nodes) > 1:
        groups.append(Group("over all nodes", tuple(nodes), list(range(job.size))))
    return groups


def measure_links(job: Job, exchange: Exchange, seconds: float) -> Links:
    """Collective; returns after so many seconds at the latest."""
    links = Links()
    thread = threading.Thread(target=_measure, args=(job, exchange, seconds, links), daemon=True)
    thread.start()
    thread.join(seconds)
    return Links(dict(links.gbytes), links.at, links.problem, links.done)


def _measure(job: Job, exchange: Exchange, seconds: float, links: Links) -> None:
    try:
        platform.select_device()  # of this thread
        dist.init_process_group(
            platform.backend(),
            store=dist.PrefixStore("links", exchange.store),
            rank=exchange.rank,
            world_size=exchange.size,
            timeout=timedelta(seconds=4 * seconds),  # later than ours: what times out there kills the process
        )
        # All groups first: making one waits for every rank.
        groups = [(group, dist.new_group(group.ranks)) for group in groups_of(job)]
        for group, process_group in groups:
            if exchange.rank in group.ranks:
                links.at = group.name
                links.gbytes[group.name] = _bus_bandwidth(process_group, len(group.ranks))
        dist.destroy_process_group()
        links.done = True
    except Exception as error:  # NCCL's and gloo's are RuntimeErrors of many kinds
        links.problem = (str(error).strip() or type(error).__name__).splitlines()[0]


def _bus_bandwidth(group: dist.ProcessGroup, size: int) -> float:
    cuda = platform.is_cuda()
    buffer = torch.empty((2**28 if cuda else 2**20) // 4, device=platform.device())
    buffer.fill_(dist.get_rank(group) + 1)
    dist.all_reduce(buffer, group=group)  # starts the communicator too
    if not bool((buffer == size * (size + 1) / 2).all()):
        raise RuntimeError("an all-reduce gave a wrong sum")
    buffer.zero_()
    rounds = 5 if cuda else 2
    dist.all_reduce(buffer, group=group)
    platform.synchronize()
    began = time.perf_counter()
    for _ in range(rounds):
        dist.all_reduce(buffer, group=group)
    platform.synchronize()
    return 2 * (size - 1) / size * buffer.nbytes * rounds / (time.perf_counter() - began) / 1e9


def judge_links(job: Job, links: list[Links], device: str) -> list[Finding]:
    """`device`: the name of the GPUs; on a CPU only what hangs or fails is judged."""
    broken = _judge_broken(job, links)
    if broken:
        return broken
    groups = groups_of(job)
    speeds = {group.name: min(links[rank].gbytes[group.name] for rank in group.ranks) for group in groups}
    within = {group.nodes[0]: speeds[group.name] for group in groups if len(group.nodes) == 1}
    pairs = {group.nodes: speeds[group.name] for group in groups if len(group.nodes) == 2 < len(job.nodes)}
    whole = speeds[groups[-1].name] if len(job.nodes) > 1 else None
    told = [f"within a node {min(within.values()):.3g}"] if within else []
    told += [f"between two nodes {min(pairs.values()):.3g}"] if pairs else []
    told += [f"over all nodes {whole:.3g}"] if whole is not None else []
    if device == "CPU":
        return [fine("all-reduce", f"{', '.join(told)} GB/s (not judged on CPUs)")]
    findings = _judge_within(within, device) + _judge_pairs(job, pairs)
    if whole is not None and whole < NETWORK_LEAST:
        rule = f"less than {NETWORK_LEAST:.0f} a GPU is no InfiniBand"
        findings.append(Finding("all-reduce", Level.WARNING, f"over all nodes {whole:.2g} GB/s", rule, _NETWORK_WAY_OUT))
    return findings or [fine("all-reduce", f"{', '.join(told)} GB/s")]


def _judge_within(speeds: dict[str, float], device: str) -> list[Finding]:
    if not speeds:
        return []
    median = statistics.median_high(speeds.values())
    findings = [
        Finding("all-reduce", Level.BAD_NODE, f"within {node} {speed:.0f} GB/s", f"the median node reaches {median:.0f}", nodes=(node,))
        for node, speed in speeds.items()
        if speed < SLOW * median
    ]
    if not findings and device in _NVLINK and median < NVLINK_LEAST:
        rule = f"{device} has NVLink, and less than {NVLINK_LEAST:.0f} is without"
        findings.append(
            Finding("all-reduce", Level.WARNING, f"within a node {median:.0f} GB/s", rule, "nvidia-smi topo -m shows the links")
        )
    return findings


def _judge_pairs(job: Job, speeds: dict[tuple[str, ...], float]) -> list[Finding]:
    """A node is slow if both of its pairs are. A slow pair of which neither is, is a link, and a warning."""
    if not speeds:
        return []
    median = statistics.median_high(speeds.values())
    rule = f"the median pair of nodes reaches {median:.3g}"
    slow = {pair: speed for pair, speed in speeds.items() if speed < SLOW * median}
    bad = [node for node in job.nodes if all(pair in slow for pair in speeds if node in pair)]
    findings = []
    for node in bad:
        mine = max(speed for pair, speed in slow.items() if node in pair)
        found = f"{node} and either of its neighbours reach {mine:.3g} GB/s at most"
        findings.append(Finding("all-reduce", Level.BAD_NODE, found, rule, nodes=(node,)))
    findings += [
        Finding("all-reduce", Level.WARNING, f"{' and '.join(pair)} reach {speed:.3g} GB/s", rule)
        for pair, speed in slow.items()
        if not set(pair) & set(bad)
    ]
    return findings


def _judge_broken(job: Job, links: list[Links]) -> list[Finding]:
    """Who hangs or fails. A group in which all its ranks stand has the fault; who waits for a rank that stands elsewhere has none."""
    failed = {rank: each for rank, each in enumerate(links) if each.problem}
    stuck = {rank: each for rank, each in enumerate(links) if each.stuck}
    if not failed and not stuck:
        return []
    if failed and len({job.node_of(rank) for rank in failed}) < len(job.nodes):
        rank, each = next(iter(failed.items()))
        nodes = tuple(dict.fromkeys(job.node_of(rank) for rank in failed))
        return [Finding("all-reduce", Level.BAD_NODE, f"{job.place(rank)} fails {_where(each)}: {each.problem}", nodes=nodes)]
    full = [group for group in groups_of(job) if all(rank in stuck and links[rank].at == group.name for rank in group.ranks)]
    guilty = dict.fromkeys(node for group in full for node in group.nodes)
    if guilty and len(guilty) < len(job.nodes):
        found = f"an all-reduce {' and '.join(group.name for group in full)} does not end"
        return [Finding("all-reduce", Level.BAD_NODE, found, nodes=tuple(guilty))]
    rank, each = next(iter((failed or stuck).items()))
    found = f"{job.place(rank)} {'fails' if failed else 'hangs'} {_where(each)}" + (f": {each.problem}" if each.problem else "")
    return [Finding("all-reduce", Level.FAILED, found, f"as do {len(failed or stuck)} of {job.size} ranks", _NETWORK_WAY_OUT)]


def _where(links: Links) -> str:
    return f"in an all-reduce {links.at}" if links.at else "while the process groups start"
