"""The recipe: read alike by every rank, free of mistakes at this number of processes, and that of the run whose folder it names."""

import hashlib
import os
from dataclasses import dataclass

from hybrid_megatron.config import RunConfig, load_recipe
from hybrid_megatron.config.validate import validate
from hybrid_megatron.errors import ConfigError, UserError
from hybrid_megatron.preflight.job import Job
from hybrid_megatron.preflight.report import Finding, Level, named
from hybrid_megatron.training.run_folder import check_same_run


@dataclass(frozen=True)
class RecipeRead:
    """What one rank made of the words: a config, or the mistakes in it."""

    config: RunConfig | None
    problems: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.config).encode()).hexdigest()


def read_recipe(words: list[str], rank: int, size: int) -> RecipeRead:
    try:
        config = load_recipe(words)
        validate(config, size if "WORLD_SIZE" in os.environ else _least_size(config))
        if rank == 0:
            check_same_run(config)
        return RecipeRead(config)
    except UserError as error:
        return RecipeRead(None, tuple(error.problems) if isinstance(error, ConfigError) else (str(error),))


def _least_size(config: RunConfig) -> int:
    """Processes that the layout takes at least: a person who asks on a login node means to start as many or more."""
    parallel = config.parallel
    return max(1, parallel.tensor * parallel.context * parallel.pipeline)


def judge_recipe(job: Job, read: list[RecipeRead]) -> list[Finding]:
    broken = [rank for rank, each in enumerate(read) if each.problems]
    if 0 in broken or len(broken) == len(read):
        return [Finding("recipe", Level.REFUSED, problem) for problem in read[broken[0]].problems]
    if broken:
        nodes = job.nodes_of(broken)
        found = f"it can be read on the other nodes, not on {named(nodes)}: {read[broken[0]].problems[0]}"
        return [Finding("recipe", Level.BAD_NODE, found, nodes)]
    others = job.nodes_of(rank for rank, each in enumerate(read) if each.digest != read[0].digest)
    if others:
        found = f"{named(others)} and {job.node_of(0)} read different settings from the same words; give all nodes the same files"
        return [Finding("recipe", Level.REFUSED, found)]
    return [Finding("recipe", Level.FINE, f"the same on {job.size} rank{'s' if job.size > 1 else ''}")]
