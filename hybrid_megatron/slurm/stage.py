"""One run to submit: its recipe with paths that hold anywhere, and all that would make its job fail, found before it waits in a queue."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hybrid_megatron.checkpoint.origin import check_follows, check_origin, needs_origin
from hybrid_megatron.checkpoint.store import CheckpointStore, read_progress
from hybrid_megatron.command_line import pasted
from hybrid_megatron.config import RunConfig, load_recipe, save_config
from hybrid_megatron.config.validate import world_problem
from hybrid_megatron.data import open_dataset
from hybrid_megatron.errors import CheckpointError, ConfigError, NoIndexMaps, RunError, UserError
from hybrid_megatron.planning.plan import all_problems, invalid, make_plan
from hybrid_megatron.quantities import plural
from hybrid_megatron.slurm.jobs import RECIPE, active_jobs
from hybrid_megatron.slurm.layout import words_of_job
from hybrid_megatron.training.run_folder import check_same_run

_PATHS = ("run_dir", "init_from", "data.train", "data.valid", "data.cache_dir", "data.tokenizer")


@dataclass(frozen=True)
class Stage:
    config: RunConfig
    words: list[str]
    """Recipe and overrides as typed, and from what it starts."""
    layout: list[str]
    """What the batch script adds to them for a recipe of this name, as far as no word given wins over it."""
    kept: list[str]
    """Of the words those that follow submitted.yaml, because the batch script adds something to every recipe, or may; words given win."""
    template: Path
    """The batch script."""
    name: str
    """Its place in a chain and its recipe; empty of a run that is alone."""

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """What is refused within says which stage it is."""
        with _named(self.name):
            yield


def read_stages(recipes: list[list[str]], template: Path) -> list[Stage]:
    """The runs of a chain; each starts from the parameters of the one before, unless its words say from what. Raises ConfigError."""
    stages: list[Stage] = []
    for number, words in enumerate(recipes, start=1):
        name = f"stage {number}, {words[0]}" if len(recipes) > 1 else ""
        if stages and not any(word.startswith("init_from=") for word in words):
            words = [*words, f"init_from={stages[-1].config.run_dir}"]
        with _named(name):
            stages.append(_read_stage(words, template, name))
            run_dir = stages[-1].config.run_dir
            if run_dir in [each.config.run_dir for each in stages[:-1]]:
                raise ConfigError(f"run_dir={run_dir}: two stages of this chain have it; each stage needs a folder of its own")
    return stages


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        if not name:
            raise
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        raise ConfigError([f"{name}: {problem}" for problem in problems]) from None


def _read_stage(words: list[str], template: Path, name: str) -> Stage:
    handed = words_of_job(template, words)
    last = {word.partition("=")[0]: place for place, word in enumerate(handed.words)}
    layout = [word for place, word in enumerate(handed.words) if word not in words and last[word.partition("=")[0]] == place]
    try:
        config = _absolute(load_recipe(handed.words))
    except ConfigError as error:
        raise ConfigError(_of_the_script(error.problems, layout, words, template, lambda: load_recipe(words) and [])) from None
    submitted = str(Path(config.run_dir) / RECIPE)
    kept = [_word_anywhere(word, config) for word in words[1:]]
    if handed.sure:
        always = {_section(word) for word in words_of_job(template, [submitted]).words[1:]}
        kept = [word for word in kept if _section(word) in always]
    _check_as_planned(config, words_of_job(template, [submitted, *kept]).words[1:], kept, template)
    return Stage(config, words, layout, kept, template, name)


def _section(word: str) -> str:
    return word.partition("=")[0].partition(".")[0]


def _check_as_planned(config: RunConfig, handed: list[str], kept: list[str], template: Path) -> None:
    """Raise ConfigError unless the job trains what is planned, with the words that its script hands on behind submitted.yaml."""
    with tempfile.TemporaryDirectory() as folder:
        save_config(config, Path(folder) / RECIPE)
        if load_recipe([str(Path(folder) / RECIPE), *handed]) != config:
            added = shlex.join(word for word in handed if word not in kept)
            raise ConfigError(
                f"{template}: in the job it adds {added or 'words'} to the file {RECIPE}, which makes another run of it than of the "
                "recipe; let it add the same to every recipe, or nothing to a file (*.yaml) as the project's own scripts do"
            )


def check(stage: Stage, gpus: int, earlier: list[Stage], after_another: bool) -> dict:
    """The run's plan on so many GPUs. Raises a UserError for whatever would end its job at once, or let it run out of memory.

    `earlier`: the stages before it. `after_another`: whether it waits for a job outside the chain, which may still make its `init_from`.
    """
    config = stage.config
    plan = make_plan(config, [gpus])
    if problems := _problems(plan, config, gpus):
        raise ConfigError(_of_the_script(problems, stage.layout, stage.words, stage.template, lambda: _without_layout(stage, gpus)))
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


def _of_the_script(problems: list[str], layout: list[str], words: list[str], template: Path, without: Callable[[], list[str]]) -> list[str]:
    """The problems; of those that are not there `without` the words of the batch script, it is said so, and what to write instead."""
    try:
        as_typed = without() if layout else problems
    except ConfigError:
        return problems
    told = f"{shlex.join(layout)} stands in {template.name} for this recipe, not among your words"
    with contextlib.suppress(AttributeError):  # a setting that there is not
        config = load_recipe(words)
        instead = [f"{name}={json.dumps(_setting(config, name))}" for name in dict.fromkeys(word.partition("=")[0] for word in layout)]
        told += f"; words given win, {shlex.join(instead)} gives the recipe's own"
    return [problem if problem in as_typed else f"{problem}; {told}" for problem in problems]


def _setting(config: RunConfig, name: str) -> object:
    return functools.reduce(getattr, name.split("."), config)


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
        way_out = f"add {shlex.join(suggested['overrides'])}" if suggested else "no layout of so many GPUs fits; take more"
        raise RunError(
            f"{plan['recipe']}: on {plural(gpus, 'GPU')} it takes {needed['peak']:.1f} GiB of each, and {needed['usable']:.1f} are usable; "
            f"{way_out}"
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


def _word_anywhere(word: str, config: RunConfig) -> str:
    """A word as it holds in the folder where the job runs: with the path that `_absolute` gave it."""
    name = word.partition("=")[0]
    value = _setting(config, name) if name in _PATHS else None
    return word if value is None else f"{name}={value}"


def _init_from(config: RunConfig) -> str | None:
    """As the run folder has it, where that means the same: a run resumes only with the settings it began with."""
    recorded = Path(config.run_dir) / "config.yaml"
    before = load_recipe([str(recorded)]).init_from if recorded.is_file() else None
    return before if _anywhere(before) == _anywhere(config.init_from) else _anywhere(config.init_from)
