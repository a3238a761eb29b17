"""One run to submit: its recipe as its job will have it, and what the batch script makes of that."""

import contextlib
import shlex
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hybrid_megatron.config import RunConfig, as_written, load_recipe, save_config
from hybrid_megatron.errors import ConfigError, RunError, UserError
from hybrid_megatron.slurm.jobs import RECIPE
from hybrid_megatron.slurm.layout import words_of_job
from hybrid_megatron.slurm.recipe_paths import setting, with_absolute_paths, word_anywhere


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
        config = with_absolute_paths(load_recipe(handed.words))
    except ConfigError as error:
        raise ConfigError(of_the_script(error.problems, layout, words, template, lambda: load_recipe(words) and [])) from None
    submitted = str(Path(config.run_dir) / RECIPE)
    kept = [word_anywhere(word, config) for word in words[1:]]
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


def of_the_script(problems: list[str], layout: list[str], words: list[str], template: Path, without: Callable[[], list[str]]) -> list[str]:
    """The problems; of those that are not there `without` the words of the batch script, it is said so, and what to write instead."""
    try:
        as_typed = without() if layout else problems
    except ConfigError:
        return problems
    told = f"{shlex.join(layout)} stands in {template.name} for this recipe, not among your words"
    with contextlib.suppress(AttributeError):  # a setting that there is not
        config = load_recipe(words)
        instead = [f"{name}={as_written(setting(config, name))}" for name in dict.fromkeys(word.partition("=")[0] for word in layout)]
        told += f"; words given win, {shlex.join(instead)} gives the recipe's own"
    return [problem if problem in as_typed else f"{problem}; {told}" for problem in problems]


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
