"""What each node finds by itself and sees of the others: GPUs, software, folders, data, clocks. Everything but speed."""

import contextlib
import secrets
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from hybrid_megatron.checkpoint.sizes import checkpoint_bytes
from hybrid_megatron.checkpoint.store import CheckpointStore
from hybrid_megatron.config.megatron import parameter_dtype
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.model.accounting import account
from hybrid_megatron.model.kernels import asked_of_transformer_engine, transformer_engine_problem
from hybrid_megatron.model.mixers import MIXERS
from hybrid_megatron.model.pattern import LayerPlan, plan_layers
from hybrid_megatron.planning.layout import Layout
from hybrid_megatron.planning.memory import peak_memory
from hybrid_megatron.preflight.exchange import Exchange
from hybrid_megatron.preflight.files import Seen, gather_files, judge_files
from hybrid_megatron.preflight.folders import Folder, gather_folders, judge_folders, judge_room, judge_run_folder, look_for, open_run_folder
from hybrid_megatron.preflight.gpus import Device, gather_device, judge_gpus, judge_memory
from hybrid_megatron.preflight.job import Job
from hybrid_megatron.preflight.report import Finding, Level
from hybrid_megatron.preflight.software import Software, gather_software, judge_software

NODE_FACTS = "software, folders and data"
"""What the first rank of each node is asked for."""
MOST_APART = 2.0
"""Seconds by which clocks may differ: far above what this measurement is wrong by, and what times in logs of two nodes may be."""


@dataclass(frozen=True)
class _NodeFacts:
    """What the first rank of a node finds out for all of it."""

    software: Software
    folders: dict[str, Folder]
    files: dict[str, Seen]
    run_folder: Folder
    steps: list[int]
    """Of the run's own checkpoints."""


def look_at_nodes(words: list[str], config: RunConfig, exchange: Exchange, job: Job, devices: list[Device]) -> list[Finding]:
    """`words`: the recipe as typed. Fills `devices`, by rank. Collective."""
    plan = plan_layers(config)
    devices[:] = exchange.of_all("GPUs", lambda: gather_device(job.members[exchange.rank].local_rank))
    facts, unseen, clocks = _look(words, config, plan, exchange, job)
    first, cuda = facts[job.nodes[0]], any(device.is_cuda for device in devices)

    findings = judge_gpus(job, devices)
    if all(device.is_cuda for device in devices):
        findings += judge_memory(job, devices, peak_memory(Layout(config, plan, job.size)))
    findings += judge_software({node: each.software for node, each in facts.items()}, cuda)
    if not cuda and (asked := asked_of_transformer_engine(config)):
        findings.append(Finding("Transformer Engine", Level.UNKNOWN, f"{asked}: whether it can be imported shows where there are GPUs"))
    findings += judge_folders({node: each.folders for node, each in facts.items()}, cuda)
    for setting in first.files:
        findings += judge_files(setting, {node: each.files[setting] for node, each in facts.items()})
    findings += judge_run_folder(config.run_dir, {node: each.run_folder for node, each in facts.items()}, unseen)
    one = checkpoint_bytes(account(config, plan).total_params, parameter_dtype(config).itemsize)
    findings += judge_room(first.run_folder, one, *checkpoints_to_come(config, first.steps))
    return findings + judge_clocks(clocks)


def _look(
    words: list[str], config: RunConfig, plan: LayerPlan, exchange: Exchange, job: Job
) -> tuple[dict[str, _NodeFacts], dict[str, list[str]], dict[str, float]]:
    """By node: its facts, the nodes whose files in the run folder it does not see, and its clock at one moment."""
    node, leads = job.node_of(exchange.rank), job.leads(exchange.rank)
    needs_fla = any(MIXERS[group.mixer].needs_fla for layer in plan.layers for group in layer.groups)
    [token, *_] = exchange.of_all("token", lambda: secrets.token_hex(4))
    with contextlib.ExitStack() as stack:

        def gather() -> _NodeFacts | None:
            if not leads:
                return None
            run_folder = stack.enter_context(open_run_folder(Path(config.run_dir), token, node))
            steps = [int(path.name[5:]) for path in CheckpointStore(Path(config.run_dir)).complete()]
            software = gather_software(needs_fla, transformer_engine_problem(config))
            return _NodeFacts(software, gather_folders(), gather_files(config, words), run_folder, steps)

        facts = job.of_nodes(exchange.of_all(NODE_FACTS, gather))
        written = {name: each.run_folder.file for name, each in facts.items() if not each.run_folder.problem}
        unseen = exchange.of_all("other nodes' files", lambda: look_for(written) if leads and node in written else [])
        clocks = exchange.of_all("clocks", time.time)  # all ranks come from the line before at the same moment
    return facts, job.of_nodes(unseen), job.of_nodes(clocks)


def checkpoints_to_come(config: RunConfig, steps: list[int]) -> tuple[int, int]:
    """How many rolling ones must still fit at once (`keep_last` and the one being written), and how many will stay for ever, of a run that
    has checkpoints of these steps."""
    interval = getattr(config.checkpoint, "permanent_interval_steps", None)
    done = max(steps, default=0)
    permanent = config.num_steps // interval - done // interval if interval else 0
    return max(1, config.checkpoint.keep_last + 1 - len(steps)), permanent


def judge_clocks(seconds: dict[str, float]) -> list[Finding]:
    """`seconds`: each node's clock at one moment, give or take the tenth of a second that ranks leave an exchange apart."""
    middle = statistics.median_low(seconds.values())
    apart = {node: each - middle for node, each in seconds.items() if abs(each - middle) > MOST_APART}
    if apart:
        told = ", ".join(f"{node}'s is off by {each:+.1f} s" for node, each in apart.items())
        return [Finding("clocks", Level.WARNING, f"{told}, so times in logs cannot be compared; its time service wants a look")]
    return [Finding("clocks", Level.FINE, f"within {max(seconds.values()) - min(seconds.values()):.1f} s of each other")]
