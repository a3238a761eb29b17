"""The two forms of a checkpoint: what saving costs, and under which layouts a run resumes from it.

rolling    megatron-core's `dp_reshardable`: every rank writes the optimizer state it holds as it lies in its buffers, and nothing is
           gathered. Buffers are cut by tensor and pipeline ranks, so these sizes must stay; data and context sizes may change.
permanent  `fully_reshardable`: the optimizer state as one tensor a parameter, gathered over the data ranks before it is written. Any
           layout may read it.

Parameters alone are read from both under any layout.
"""

from pathlib import Path

from hybrid_megatron.errors import CheckpointError

ROLLING, PERMANENT = "rolling", "permanent"
OPTIMIZER_SHARDING = {ROLLING: "dp_reshardable", PERMANENT: "fully_reshardable"}
"""megatron-core's names."""
_FIXED = ("tensor", "pipeline", "virtual_pipeline")


def check_layout(checkpoint: Path, form: str, written: dict[str, int], now: dict[str, int], others: list[tuple[Path, str]]) -> None:
    """Raise CheckpointError if a run of layout `now` cannot resume from this checkpoint. `others`: the older ones and their forms."""
    if form == PERMANENT or all(written.get(name) == now[name] for name in _FIXED):
        return
    permanent = [path for path, its in others if its == PERMANENT]
    stop = "resume under the old layout and stop with Ctrl-C (SIGINT), which saves a permanent one"
    if permanent:
        newest = max(permanent, key=lambda path: path.name)
        stop += f", or move those after {newest.name}, the newest permanent one, away to resume from it"
    raise CheckpointError(
        f"{checkpoint}: a rolling checkpoint, which keeps its tensor, pipeline and virtual pipeline sizes; it was written under "
        f"{_sizes(written)}, and this run has {_sizes(now)}; {stop}"
    )


def _sizes(layout: dict[str, int]) -> str:
    return ", ".join(f"{name} {layout.get(name)}" for name in _FIXED)
