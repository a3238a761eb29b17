"""What each rank, and the first rank of each node for all of it, finds out by itself."""

import traceback
from dataclasses import dataclass
from pathlib import Path

from hybrid_megatron import platform
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.model.mixers import MIXERS
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.preflight.checkpoints import Origin, see_origin
from hybrid_megatron.preflight.data import gather_data
from hybrid_megatron.preflight.disk import Space, gather_spaces, space_at
from hybrid_megatron.preflight.environment import Surroundings, gather_surroundings
from hybrid_megatron.preflight.gpu_health import NodeHealth, gather_health
from hybrid_megatron.preflight.gpus import Device, gather_device, gpus_promised
from hybrid_megatron.preflight.network import Network, gather_network, unreachable
from hybrid_megatron.preflight.seen import Seen
from hybrid_megatron.preflight.shared_folder import Written
from hybrid_megatron.preflight.versions import Software, gather_software
from hybrid_megatron.training.wandb_mode import wandb_mode


@dataclass(frozen=True)
class NodeFacts:
    software: Software
    health: NodeHealth
    spaces: dict[str, Space]
    data: dict[str, Seen]
    origin: Seen | None
    surroundings: Surroundings
    network: Network
    written: Written


@dataclass(frozen=True)
class RunFacts:
    """Of the job's first rank, which alone writes the run folder and talks to wandb."""

    space: Space
    wandb: str
    """online, offline or disabled."""
    wandb_problem: str
    gpus_promised: bool


@dataclass(frozen=True)
class RankFacts:
    device: Device
    pair_problem: str | None
    """Of triton and this GPU, where the recipe needs both."""
    node: NodeFacts | None = None
    run: RunFacts | None = None


def gather_rank(config: RunConfig, local_rank: int, processes: int) -> RankFacts:
    device = gather_device(local_rank, processes)
    needs_fla = any(MIXERS[group.mixer].needs_fla for layer in plan_layers(config) for group in layer.groups)
    return RankFacts(device, platform.kernel_pair_problem() if needs_fla else None)


def gather_node(config: RunConfig, words: list[str], origin: Origin, processes: int, written: Written) -> NodeFacts:
    network = gather_network()
    return NodeFacts(
        gather_software(),
        gather_health(),
        gather_spaces(),
        gather_data(config, words),
        see_origin(origin),
        gather_surroundings(processes, network.infiniband),
        network,
        written,
    )


def gather_run(config: RunConfig) -> RunFacts:
    mode = wandb_mode(config.tracking.wandb)
    return RunFacts(space_at(Path(config.run_dir)), mode, unreachable() if mode == "online" else "", gpus_promised())


def attempt(function, *arguments):
    """(its result, no problem), or (None, what went wrong in one line): a rank that fails must still answer the others."""
    try:
        return function(*arguments), ""
    except Exception as error:  # whatever a driver, a disk or a library throws
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        return None, f"{type(error).__name__}: {reason} (in {Path(frame.filename).name}, line {frame.lineno})"
