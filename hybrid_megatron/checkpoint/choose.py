"""Which checkpoint a run resumes from: the newest whole one."""

from dataclasses import dataclass
from pathlib import Path

from hybrid_megatron.checkpoint.form import check_layout
from hybrid_megatron.checkpoint.integrity import check_hashes
from hybrid_megatron.checkpoint.store import CheckpointStore, Progress, forms_of, read_progress
from hybrid_megatron.errors import CheckpointError
from hybrid_megatron.parallel import ParallelState


@dataclass(frozen=True)
class Chosen:
    path: Path
    progress: Progress
    damaged: list[tuple[Path, str]]
    """Newer ones that are not whole, and what is wrong with each."""


def newest_whole(store: CheckpointStore, state: ParallelState) -> Chosen | None:
    """The newest checkpoint of which marker and all hashes are right, or None if there is none at all; collective, and only reads.

    Rank 0's list counts, since a shared file system may show the others an older state; each rank checks its share of the files, and what
    one finds wrong is wrong for all. Raises CheckpointError if there are checkpoints and none is whole, or if this layout cannot resume
    from the newest whole one.
    """
    there = state.from_rank_0(store.complete())
    damaged: list[tuple[Path, str]] = []
    for path in reversed(there):
        try:
            progress = check_whole(path, state)
        except CheckpointError as error:
            damaged.append((path, str(error)))
            continue
        with state.together():
            if state.rank == 0:
                older = [each for each in there if each.name < path.name]
                check_layout(path, progress.form, progress.layout, state.layout, forms_of(older))
        return Chosen(path, progress, damaged)
    if damaged:
        raise CheckpointError(_none_is_whole(store, damaged))
    return None


def check_whole(checkpoint: Path, state: ParallelState) -> Progress:
    """Marker and hashes; collective. Raises the same CheckpointError on all ranks."""
    with state.together():
        progress = read_progress(checkpoint)
        check_hashes(checkpoint, state.rank, state.world_size)
    return progress


def _none_is_whole(store: CheckpointStore, damaged: list[tuple[Path, str]]) -> str:
    if len(damaged) == 1:
        [(path, problem)] = damaged
        return f"{problem}; it is the only checkpoint: bring it back from a copy, or move {path} away to begin this run anew"
    problems = "; ".join(problem for _, problem in damaged)
    return (
        f"{problems}; none of the {len(damaged)} checkpoints is whole: bring one back from a copy, or move {store.path} away to begin anew"
    )
