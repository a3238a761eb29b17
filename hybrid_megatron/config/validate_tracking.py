"""Rules of what wandb is told: a word that it would refuse must not cost a run its mirror."""

from collections.abc import Iterator

from hybrid_megatron.config.schema import RunConfig

_NOT_IN_A_PROJECT = "/\\#?%:"
LONGEST_TAG = 64


def tracking_problems(config: RunConfig) -> Iterator[str]:
    project = config.tracking.project
    if not 1 <= len(project) <= 128 or set(project) & set(_NOT_IN_A_PROJECT):
        yield f"tracking.project={project}: wandb takes 1 to 128 characters, and none of {' '.join(_NOT_IN_A_PROJECT)}; use another name"
    for i, tag in enumerate(config.tracking.tags or []):
        if not 1 <= len(tag) <= LONGEST_TAG:
            yield f"tracking.tags[{i}]={tag}: wandb takes 1 to {LONGEST_TAG} characters; shorten it"
