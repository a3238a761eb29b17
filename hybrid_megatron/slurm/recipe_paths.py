"""The paths of a recipe as they hold anywhere: a job runs in another folder than the one where it is submitted."""

import dataclasses
import functools
from pathlib import Path

from hybrid_megatron.config import RunConfig, load_recipe

_PATHS = ("run_dir", "init_from", "data.train", "data.valid", "data.cache_dir", "data.tokenizer")


def with_absolute_paths(config: RunConfig) -> RunConfig:
    paths = {name: _absolute(name, config) for name in _PATHS}
    data = {name.removeprefix("data."): path for name, path in paths.items() if name.startswith("data.")}
    own = {name: path for name, path in paths.items() if "." not in name}
    return dataclasses.replace(config, **own, data=dataclasses.replace(config.data, **data))


def word_anywhere(word: str, config: RunConfig) -> str:
    """A word of a recipe whose paths are absolute in `config`, with the path it has there."""
    name = word.partition("=")[0]
    value = setting(config, name) if name in _PATHS else None
    return word if value is None else f"{name}={value}"


def setting(config: RunConfig, name: str) -> object:
    """Of section.key. Raises AttributeError where there is none."""
    return functools.reduce(getattr, name.split("."), config)


def _absolute(name: str, config: RunConfig) -> str | None:
    path = setting(config, name)
    if path is None or (name == "data.tokenizer" and not Path(path).is_file()):  # then it is a tokenizer's name
        return path
    absolute = str(Path(path).absolute())
    return _as_recorded(config, absolute) if name == "init_from" else absolute


def _as_recorded(config: RunConfig, init_from: str) -> str:
    """As the run folder has it, where that means the same: a run resumes only with the settings it began with."""
    recorded = Path(config.run_dir) / "config.yaml"
    before = load_recipe([str(recorded)]).init_from if recorded.is_file() else None
    return before if before is not None and str(Path(before).absolute()) == init_from else init_from
