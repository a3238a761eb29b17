"""One run to submit: its recipe with paths that hold anywhere, and all that would make its job fail, found before it waits in a queue."""

import dataclasses
from pathlib import Path

from hybrid_megatron.checkpoint.store import CheckpointStore, read_progress
from hybrid_megatron.config import RunConfig, load_recipe, save_config
from hybrid_megatron.data import open_dataset
from hybrid_megatron.errors import CheckpointError, ConfigError, NoIndexMaps, RunError
from hybrid_megatron.planning.plan import all_problems, invalid, make_plan
from hybrid_megatron.slurm.jobs import RECIPE, active_jobs
from hybrid_megatron.training.run_folder import check_same_run


def read_stages(recipes: list[list[str]]) -> list[RunConfig]:
    """The runs of a chain; each starts from the parameters of the one before, unless its words say from what. Raises ConfigError."""
    configs: list[RunConfig] = []
    for words in recipes:
        if configs and not any(word.startswith("init_from=") for word in words):
            words = [*words, f"init_from={configs[-1].run_dir}"]
        configs.append(load_recipe(words))
        if any(config.run_dir == configs[-1].run_dir for config in configs[:-1]):
            raise ConfigError(f"run_dir={configs[-1].run_dir}: two stages of this chain have it; each stage needs a folder of its own")
    return [_absolute(config) for config in configs]


def check(config: RunConfig, words: list[str], gpus: int) -> dict:
    """The run's plan on so many GPUs. Raises a UserError for whatever would end its job at once, or let it run out of memory."""
    plan = make_plan(config, [gpus])
    if invalid(plan):
        raise ConfigError(all_problems(plan))
    _check_memory(plan, gpus)
    check_same_run(config)
    try:
        for split in ("train", "valid") if config.data.valid is not None else ("train",):
            open_dataset(config, split)
    except NoIndexMaps as error:
        raise error.of_recipe(words) from None
    return plan


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
            f"python -m launch cancel {run_dir}, or give another folder with run_dir=PATH"
        )


def write_recipe(config: RunConfig) -> Path:
    """RUN_DIR/submitted.yaml, whole or not at all."""
    path = Path(config.run_dir) / RECIPE
    new = path.with_name(f".{RECIPE}.new")
    try:
        save_config(config, new)
        new.replace(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); give another folder with run_dir=PATH") from None
    return path


def _check_memory(plan: dict, gpus: int) -> None:
    needed, suggested = plan["memory_gib_per_gpu"][str(gpus)], plan["suggestion"][str(gpus)]
    if not needed["fits"]:
        way_out = f"add {' '.join(suggested['overrides'])}" if suggested else "no layout of so many GPUs fits; take more"
        raise RunError(
            f"{plan['recipe']}: on {gpus} GPUs it takes {needed['peak']:.1f} GiB of each, and {needed['usable']:.1f} are usable; {way_out}"
        )


def _absolute(config: RunConfig) -> RunConfig:
    """The same with absolute paths: the job runs in another folder. A tokenizer may also be a name."""
    data = {name: _anywhere(getattr(config.data, name)) for name in ("train", "valid", "cache_dir")}
    tokenizer = config.data.tokenizer
    if tokenizer is not None and Path(tokenizer).is_file():
        data["tokenizer"] = _anywhere(tokenizer)
    return dataclasses.replace(
        config, run_dir=_anywhere(config.run_dir), init_from=_init_from(config), data=dataclasses.replace(config.data, **data)
    )


def _anywhere(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def _init_from(config: RunConfig) -> str | None:
    """As the run folder has it, where that means the same: a run resumes only with the settings it began with."""
    recorded = Path(config.run_dir) / "config.yaml"
    before = load_recipe([str(recorded)]).init_from if recorded.is_file() else None
    return before if _anywhere(before) == _anywhere(config.init_from) else _anywhere(config.init_from)
