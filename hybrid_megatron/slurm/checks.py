"""All that would make a run's job fail, found before it waits in a queue."""

import math
import os
import shlex
from pathlib import Path

from hybrid_megatron.checkpoint.origin import check_follows, check_origin, needs_origin
from hybrid_megatron.checkpoint.store import CheckpointStore, read_progress
from hybrid_megatron.command_line import pasted
from hybrid_megatron.config import RunConfig, load_recipe
from hybrid_megatron.config.validate import world_problem
from hybrid_megatron.data import open_dataset
from hybrid_megatron.errors import CheckpointError, ConfigError, NoIndexMaps, RunError
from hybrid_megatron.planning.plan import all_problems, invalid, make_plan
from hybrid_megatron.quantities import plural
from hybrid_megatron.slurm.jobs import RECIPE, active_jobs
from hybrid_megatron.slurm.stage import Stage, of_the_script
from hybrid_megatron.training.run_folder import check_same_run


def check(stage: Stage, gpus: int, earlier: list[Stage], after_another: bool) -> dict:
    """The run's plan on so many GPUs. Raises a UserError for whatever would end its job at once, or let it run out of memory.

    `earlier`: the stages before it. `after_another`: whether it waits for a job outside the chain, which may still make its `init_from`.
    """
    config = stage.config
    plan = make_plan(config, [gpus])
    if problems := _problems(plan, config, gpus):
        raise ConfigError(of_the_script(problems, stage.layout, stage.words, stage.template, lambda: _without_layout(stage, gpus)))
    _check_memory(plan, gpus)
    check_same_run(config)
    _check_start(config, [each.config for each in earlier], after_another)
    try:
        for split in ("train", "valid") if config.data.valid is not None else ("train",):
            open_dataset(config, split)
    except NoIndexMaps as error:
        raise error.of_recipe(stage.words) from None
    return plan


def _problems(plan: dict, config: RunConfig, gpus: int) -> list[str]:
    """Why it cannot run on so many GPUs, with the way out that a job has."""
    if not invalid(plan):
        return []
    sizes = (config.parallel.tensor, config.parallel.context, config.parallel.pipeline)
    ranks = math.prod(sizes)
    not_divided = world_problem(config.parallel, gpus) if ranks > 0 else None
    said = (
        f"parallel: tensor * context * pipeline = {' * '.join(map(str, sizes))} = {ranks} must divide the {plural(gpus, 'GPU')} of the "
        f"job; ask for a multiple of {ranks}, with --gres=gpu:N and --nodes=N behind --, or lower one of them"
    )
    return [said if problem == not_divided else problem for problem in all_problems(plan)]


def _without_layout(stage: Stage, gpus: int) -> list[str]:
    config = load_recipe(stage.words)
    return _problems(make_plan(config, [gpus]), config, gpus)


def _check_memory(plan: dict, gpus: int) -> None:
    needed, suggested = plan["memory_gib_per_gpu"][str(gpus)], plan["suggestion"][str(gpus)]
    if not needed["fits"]:
        way_out = f"add {shlex.join(suggested['overrides'])}" if suggested else "no layout of so many GPUs fits; take more"
        raise RunError(
            f"{plan['recipe']}: on {plural(gpus, 'GPU')} it takes {needed['peak']:.1f} GiB of each, and {needed['usable']:.1f} are usable; "
            f"{way_out}"
        )


def _check_start(config: RunConfig, earlier: list[RunConfig], after_another: bool) -> None:
    """That the parameters it starts from are those of its model, be it that they are still to come."""
    if not needs_origin(config):
        return
    origin = Path(config.init_from).resolve()
    before = next((each for each in earlier if origin.is_relative_to(Path(each.run_dir).resolve())), None)
    if before is None and after_another and (origin / RECIPE).is_file() and CheckpointStore(origin).newest() is None:
        before = load_recipe([str(origin / RECIPE)])
    try:
        if before is None:
            check_origin(config)
        else:
            check_follows(config, before)
    except CheckpointError as error:
        raise CheckpointError(f"init_from={error}") from None


def is_complete(config: RunConfig) -> bool:
    newest = CheckpointStore(config.run_dir).newest()
    try:
        return newest is not None and read_progress(newest).step >= config.num_steps
    except CheckpointError:  # a damaged one, which training passes over
        return False


def check_free(run_dir: Path) -> None:
    """Raise RunError if a job of this folder runs or waits."""
    if active := active_jobs(run_dir):
        told = ", ".join(f"{job.id} ({job.state.lower()})" for job in active)
        raise RunError(
            f"run_dir={run_dir}: there is already job {told} for this run folder; wait for it, end it with "
            f"{pasted('launch', 'cancel', run_dir)}, or give another folder with run_dir=PATH"
        )


def check_place(run_dir: Path) -> None:
    """Raise RunError if a job of this folder runs or waits, or if it cannot be written to or made. Makes nothing."""
    check_free(run_dir)
    place = run_dir.absolute()
    while not os.path.lexists(place):
        place = place.parent
    problem = "Not a directory" if not place.is_dir() else None if os.access(place, os.W_OK | os.X_OK) else "Permission denied"
    if problem:
        raise RunError(f"run_dir={run_dir}: cannot write there ({problem}); give another with run_dir=PATH")
