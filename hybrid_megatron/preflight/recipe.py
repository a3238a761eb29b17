"""The recipe: read alike by every rank, free of mistakes at this number of processes, and that of the run whose folder it names."""

import dataclasses
import hashlib
from dataclasses import dataclass, field

from hybrid_megatron.config import RunConfig, load_recipe
from hybrid_megatron.config.validate import validate
from hybrid_megatron.errors import ConfigError, UserError
from hybrid_megatron.preflight.agreement import named
from hybrid_megatron.preflight.checkpoints import Origin, find_origin
from hybrid_megatron.preflight.finding import Finding, Level, fine
from hybrid_megatron.preflight.job import Job
from hybrid_megatron.training.run_folder import check_same_run


@dataclass(frozen=True)
class RecipeRead:
    """What one rank made of the words."""

    config: RunConfig | None
    problems: list[str] = field(default_factory=list)
    origin: Origin | None = None
    """Where the run begins; of rank 0."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.config and dataclasses.asdict(self.config)).encode()).hexdigest()


def read_recipe(words: list[str], rank: int, size: int) -> RecipeRead:
    try:
        config = load_recipe(words)
        validate(config, size)
        if rank == 0:
            check_same_run(config)
            return RecipeRead(config, [], find_origin(config))
        return RecipeRead(config)
    except UserError as error:
        return RecipeRead(None, error.problems if isinstance(error, ConfigError) else [str(error)])


def judge_recipe(job: Job, read: list[RecipeRead]) -> list[Finding]:
    broken = [rank for rank, each in enumerate(read) if each.problems]
    if 0 in broken or len(broken) == len(read):
        return [Finding("recipe", Level.REFUSED, problem) for problem in read[broken[0]].problems]
    if broken:
        nodes = tuple(dict.fromkeys(job.node_of(rank) for rank in broken))
        found = f"it can be read on the other nodes, not on {named(nodes)}: {read[broken[0]].problems[0]}"
        return [Finding("recipe", Level.BAD_NODE, found, nodes=nodes)]
    others = {job.node_of(rank) for rank, each in enumerate(read) if each.digest != read[0].digest}
    if others:
        found = f"{named(sorted(others))} and {job.node_of(0)} read different settings from the same words"
        return [Finding("recipe", Level.REFUSED, found, way_out="give all nodes the same files, on a shared file system")]
    return [fine("recipe", f"the same on all {job.size} ranks")]
