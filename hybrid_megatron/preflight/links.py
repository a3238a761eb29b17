"""How fast GPUs exchange data: an all-reduce within each node, between neighbouring nodes where there are three or more, and over all.

The order finds the culprit: what is slow or hangs within a node is that node's, and of the pairs of nodes in a ring a slow node spoils both
of its own. All of it runs in a thread, since a collective that a rank does not enter never ends; after `seconds` the main thread says how
far it came. A process whose thread is stuck must be left by os._exit.
"""

import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from hybrid_megatron import platform
from hybrid_megatron.preflight.exchange import Exchange
from hybrid_megatron.preflight.job import Job
from hybrid_megatron.preflight.report import Finding, Level
from hybrid_megatron.preflight.speed import usual

SLOW = 0.7
"""Least share of what is usual among nodes or pairs of nodes: the fabric is shared with other jobs, a step waits little for it."""
NVLINK_LEAST = 100.0
"""GB/s within a node below which GPUs that have NVLink do not use it; PCIe gives some 20, NVLink 350 and more."""
NETWORK_LEAST = 5.0
"""GB/s a GPU between nodes below which the network is no InfiniBand: 40 Gbit/s."""
THREAD = "all-reduces"
_LATER = 4.0
"""Times our own limit: what runs into torch's timeout kills the process."""
_NVLINK = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB")
_NETWORK_WAY_OUT = "NCCL_DEBUG=INFO says what NCCL takes; NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose it"


@dataclass(frozen=True)
class Group:
    """Ranks that are measured together."""

    name: str
    """As in: an all-reduce ... does not end."""
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
    stuck: bool = False
    """Its thread did not end."""


def groups_of(job: Job) -> list[Group]:
    """In the order in which they are measured: nodes, edges of a ring of nodes, all nodes."""
    groups = [Group(f"within {node}", (node,), ranks) for node, ranks in job.ranks.items() if len(ranks) > 1]
    nodes = job.nodes
    if len(nodes) > 2:
        edges = [(node, nodes[(i + 1) % len(nodes)]) for i, node in enumerate(nodes)]
        # every second edge first: those have no node in common and run at the same time
        groups += [Group(f"between {a} and {b}", (a, b), sorted(job.ranks[a] + job.ranks[b])) for a, b in edges[::2] + edges[1::2]]
    if len(nodes) > 1:
        groups.append(Group("over all nodes", tuple(nodes), list(range(job.size))))
    return groups


def measure_links(job: Job, exchange: Exchange, look: int, seconds: float) -> Links:
    """Collective; returns after so many seconds at the latest. `look`: a number that no earlier measurement of this job had."""
    links = Links()
    thread = threading.Thread(target=_measure, args=(job, exchange, look, seconds, links), name=THREAD, daemon=True)
    thread.start()
    thread.join(seconds)
    return Links(dict(links.gbytes), links.at, links.problem, thread.is_alive())


def _measure(job: Job, exchange: Exchange, look: int, seconds: float, links: Links) -> None:
    try:
        platform.select_device()  # of this thread
        dist.init_process_group(
            platform.backend(),
            store=dist.PrefixStore(f"links/{look}", exchange.store),
            rank=exchange.rank,
            world_size=exchange.size,
            timeout=timedelta(seconds=_LATER * seconds),
        )
        # All groups first: making one waits for every rank.
        groups = [(group, dist.new_group(group.ranks)) for group in groups_of(job)]
        for group, process_group in groups:
            if exchange.rank in group.ranks:
                links.at = group.name
                links.gbytes[group.name] = _bus_bandwidth(process_group, len(group.ranks))
    except Exception as error:  # NCCL's and gloo's are RuntimeErrors of many kinds
        links.problem = (str(error).strip() or type(error).__name__).splitlines()[0]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _bus_bandwidth(group: dist.ProcessGroup, size: int) -> float:
    cuda = platform.is_cuda()
    buffer = torch.full(((2**28 if cuda else 2**20) // 4,), dist.get_rank(group) + 1.0, device=platform.device())
    dist.all_reduce(buffer, group=group)  # starts the communicator too
    if not bool((buffer == size * (size + 1) / 2).all()):
        raise RuntimeError("an all-reduce gave a wrong sum")
    buffer.zero_()
    rounds = 10 if cuda else 2
    dist.all_reduce(buffer, group=group)
    platform.synchronize()
    began = time.perf_counter()
    for _ in range(rounds):
        dist.all_reduce(buffer, group=group)
    platform.synchronize()
    return 2 * (size - 1) / size * buffer.nbytes * rounds / (time.perf_counter() - began) / 1e9


def judge_links(job: Job, links: list[Links], device: str) -> list[Finding]:
    """`device`: the name of the GPUs; on a CPU only what hangs or fails is judged."""
    if any(each.problem or each.stuck for each in links):
        return [_broken(job, links)]
    groups = groups_of(job)
    speeds = {group.name: min(links[rank].gbytes[group.name] for rank in group.ranks) for group in groups}
    told = ", ".join(f"{name} {speed:.3g}" for name, speed in speeds.items()) + " GB/s"
    if device == "CPU":
        return [Finding("all-reduce", Level.UNKNOWN, f"it works, {told}; how fast is not judged on CPUs")]
    findings = []
    within = {group.nodes: speeds[group.name] for group in groups if len(group.nodes) == 1}
    for nodes, speed in _slow(within).items():
        found = f"within {nodes[0]} {speed:.0f} GB/s, less than {SLOW:.0%} of the {usual(within.values()):.0f} that are usual here"
        findings.append(Finding("all-reduce", Level.BAD_NODE, found, nodes))
    if device in _NVLINK and within and usual(within.values()) < NVLINK_LEAST:
        found = (
            f"within a node {usual(within.values()):.0f} GB/s, less than NVLink's {NVLINK_LEAST:.0f}; nvidia-smi topo -m shows the links"
        )
        findings.append(Finding("all-reduce", Level.WARNING, found))
    findings += _judge_pairs(job, {group.nodes: speeds[group.name] for group in groups if len(group.nodes) == 2 < len(job.nodes)})
    whole = speeds.get("over all nodes", NETWORK_LEAST)
    if whole < NETWORK_LEAST:
        found = f"over all nodes {whole:.2g} GB/s, less than {NETWORK_LEAST:.0f} a GPU is no InfiniBand; {_NETWORK_WAY_OUT}"
        findings.append(Finding("all-reduce", Level.WARNING, found))
    return findings + [Finding("all-reduce", Level.FINE, told)]


def _slow(speeds: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    return {nodes: speed for nodes, speed in speeds.items() if speed < SLOW * usual(speeds.values())}


def _judge_pairs(job: Job, speeds: dict[tuple[str, ...], float]) -> list[Finding]:
    """A node is slow if both of its pairs are. A slow pair of which neither is, is a link, and a warning."""
    slow = _slow(speeds)
    bad = [node for node in job.nodes if slow and all(pair in slow for pair in speeds if node in pair)]
    findings = []
    for node in bad:
        found = f"{node} and either of its neighbours reach {max(slow[pair] for pair in slow if node in pair):.3g} GB/s at most"
        findings.append(Finding("all-reduce", Level.BAD_NODE, f"{found}, {usual(speeds.values()):.3g} are usual here", (node,)))
    for pair, speed in slow.items():
        if not set(pair) & set(bad):
            found = f"{' and '.join(pair)} reach {speed:.3g} GB/s, {usual(speeds.values()):.3g} are usual here"
            findings.append(Finding("all-reduce", Level.WARNING, found))
    return findings


def _broken(job: Job, links: list[Links]) -> Finding:
    """Who fails or hangs. A group in which all its ranks stand has the fault; who waits for a rank that stands elsewhere has none."""
    failed = [rank for rank, each in enumerate(links) if each.problem]
    stuck = [rank for rank, each in enumerate(links) if each.stuck and not each.problem]
    rank = (failed or stuck)[0]
    where = f"in an all-reduce {links[rank].at}" if links[rank].at else "while the process groups start"
    if failed and len(failed) < job.size and _to_blame(job.nodes_of(failed), job):
        return Finding("all-reduce", Level.BAD_NODE, f"{job.place(rank)} fails {where}: {links[rank].problem}", job.nodes_of(failed))
    full = [group for group in groups_of(job) if all(rank in stuck and links[rank].at == group.name for rank in group.ranks)]
    guilty = tuple(dict.fromkeys(node for group in full for node in group.nodes))
    if guilty and _to_blame(guilty, job):
        return Finding("all-reduce", Level.BAD_NODE, f"it does not end {' and '.join(group.name for group in full)}", guilty)
    found = f"{job.place(rank)} fails {where}: {links[rank].problem}" if failed else f"{job.place(rank)} hangs {where}"
    return Finding("all-reduce", Level.FAILED, f"{found}, as do {len(failed or stuck)} of {job.size} ranks; {_NETWORK_WAY_OUT}")


def _to_blame(nodes: tuple[str, ...], job: Job) -> bool:
    """What goes wrong on every node is a matter of the network or of settings, unless there is one node alone."""
    return len(nodes) < len(job.nodes) or len(job.nodes) == 1
