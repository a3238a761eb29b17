"""Rules of what a run does about steps that look wrong, and of steps that it leaves out."""

from collections.abc import Iterator

from hybrid_megatron.config.schema import RunConfig

NON_FINITE = ("stop", "skip")
SPIKE = ("ignore", "warn", "skip", "stop")
LEAST_WINDOW = 8


def stability_problems(config: RunConfig) -> Iterator[str]:
    stability = config.stability
    if stability.window < LEAST_WINDOW:
        yield (
            f"stability.window={stability.window}: it must be at least {LEAST_WINDOW}, since half of it must do for a standard deviation; "
            "128 is usual"
        )
    for i, window in enumerate(stability.skip_steps):
        key = f"stability.skip_steps[{i}]={window}"
        if len(window) != 2:
            example = f"write [{window[0]}, {window[0]}] for a single one" if len(window) == 1 else "e.g. [961, 976]"
            yield f"{key}: it must be [first step, last step]; {example}"
        elif not 1 <= window[0] <= window[1] <= config.num_steps:
            yield (
                f"{key}: it must be [first step, last step] with 1 <= first <= last <= {config.num_steps}, the steps of this run, counted "
                "as in metrics.jsonl"
            )


def skipped_until(config: RunConfig, step: int) -> set[int]:
    """Those of `stability.skip_steps` that are among the first `step` steps."""
    return {number for window in config.stability.skip_steps if len(window) == 2 for number in range(window[0], min(window[1], step) + 1)}
