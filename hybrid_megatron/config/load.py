"""Recipe -> RunConfig: fragments joined by `+`, their `bases` beneath them, overrides `a.b=c` on top. And settings `a.b=c` alone, for
commands that have settings of their own.

A word of a recipe is either the path of a YAML file or the name of a fragment in `recipes/`, `recipes/models`, `recipes/patterns`,
`recipes/stages` or `recipes/variants`. Later words lay over earlier ones. A file may list `bases:`, names or paths that are laid beneath
every word. STUDY:RUN is a run of a study (studies.py). Unknown keys and wrong types are collected over all files and overrides and reported
together.

A value may follow others: `${times:${model.hidden_size},7,2}` is hidden size * 7 / 2, rounded down. `???` asks a recipe for a value of its
own.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybrid_megatron.config.fragments import RECIPES, files_of, read_yaml
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.config.setting_types import read_override, type_problems
from hybrid_megatron.config.studies import find_run
from hybrid_megatron.config.validate_tracking import LONGEST_TAG
from hybrid_megatron.errors import ConfigError
from hybrid_megatron.quantities import parse_count


def _times(value: int, numerator: int, denominator: int) -> int:
    return value * numerator // denominator


OmegaConf.register_resolver("times", _times)


def load_recipe(words: list[str], beneath: dict | None = None, above: dict | None = None) -> RunConfig:
    """Read a recipe as typed on a command line, e.g. ["776m+gdn_nope_lh+pretrain_4k", "parallel.tensor=2"].

    The first word is the recipe, or STUDY:RUN, the others are overrides. `beneath`, a tree of settings, lies under every file and `above`
    over them, for a caller that can do without some of them; they are no part of the run folder's name. Raises ConfigError with every
    unknown key, wrong type and missing value. Rules between settings are checked by `validate`, which also needs the number of processes.
    """
    if not words:
        raise ConfigError("no recipe given: name a YAML file or fragments joined by +, e.g. 776m+gdn_nope_lh+pretrain_4k")
    if "=" in words[0] and not Path(words[0]).is_file():
        raise ConfigError(
            f"{words[0]!r} stands where the recipe belongs: name the recipe first, e.g. 776m+gdn_nope_lh+pretrain_4k {words[0]}"
        )
    study = None
    if _names_a_run(words[0]):
        run = find_run(words[0])
        study, words = run.study, [*run.arguments(), *words[1:]]
    recipe, overrides = words[0], words[1:]
    files = files_of(_words_of(recipe))

    def fill(merged) -> None:
        _name_the_run(merged, recipe, overrides)
        _sort_among_runs(merged.tracking, recipe, files, study)

    layers = [("defaults", beneath or {}), *((path.name, read_yaml(path)) for path in files), ("defaults", above or {})]
    return _filled(RunConfig, layers + _read_overrides(overrides), recipe, fill)


def _names_a_run(word: str) -> bool:
    return ":" in word and "/" not in word and not Path(word).is_file()


def load_settings[Settings](schema: type[Settings], words: list[str]) -> Settings:
    """Read settings as typed behind a command, e.g. ["tokens=65536", "inference.logit_scale=log"]; `schema` is a class of schema.py.

    Raises ConfigError with every unknown key, wrong type and missing value.
    """
    return _filled(schema, _read_overrides(words), "settings")


def _filled[Settings](schema: type[Settings], layers: list[tuple[str, dict]], called: str, name_it: Callable | None = None) -> Settings:
    """An instance of `schema` from trees of settings, each with the words for where it comes from, later ones over earlier ones."""
    layers = [(where, _with_counts(tree)) for where, tree in layers]
    problems = [problem for where, tree in layers for problem in type_problems(tree, schema, where, schema)]
    if problems:
        raise ConfigError(problems)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), *(tree for _, tree in layers))
        if name_it is not None:
            name_it(merged)
        missing = sorted({*OmegaConf.missing_keys(merged), *_left_open(layers)})
        if missing:
            raise ConfigError([f"{key} is not set: it has no default; set it in a recipe file or as {key}=VALUE" for key in missing])
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{getattr(error, 'full_key', None) or called}: {str(error).splitlines()[0]}") from None


def _left_open(layers: list[tuple[str, dict]]) -> list[str]:
    """Keys that a file sets to ???, so that a recipe must say them, and nothing says."""
    said: dict[str, bool] = {}
    for _, tree in layers:
        for key, value in _leaves(tree):
            said[key] = said.get(key, False) or value != MISSING
    return [key for key, is_said in said.items() if not is_said]


def _leaves(tree: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _with_counts(tree: dict) -> dict:
    """The same with `tokens: 50B` and the like as whole numbers; what cannot be read stays, and is a wrong type."""
    counted = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            value = _with_counts(value)
        elif isinstance(value, str) and (key == "tokens" or str(key).endswith("_tokens")):
            with contextlib.suppress(ValueError):
                value = parse_count(value)
        counted[key] = value
    return counted


def save_config(config: RunConfig, path: Path) -> None:
    """Write the resolved config as YAML; `load_recipe([str(path)])` reads it back unchanged."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))


def _name_the_run(merged, recipe: str, overrides: list[str]) -> None:
    """Fill `name` and `run_dir`: the recipe's words, and a hash of the overrides, so that two variants never share a folder."""
    if OmegaConf.is_missing(merged, "name"):
        merged.name = "+".join(_stems_of(recipe))
    told = sorted(word for word in overrides if word.split("=")[0] not in ("name", "run_dir"))
    variant = "-" + hashlib.sha256("\n".join(told).encode()).hexdigest()[:8] if told else ""
    if OmegaConf.is_missing(merged, "run_dir"):
        merged.run_dir = f"runs/{merged.name}{variant}"


def _sort_among_runs(tracking, recipe: str, files: list[Path], study: str | None) -> None:
    """Fill what wandb finds a run by: its study, its stage, and the words of its recipe."""
    if tracking.group is None:
        tracking.group = study
    if tracking.job_type is None:
        tracking.job_type = "+".join(path.stem for path in files if path.parent == RECIPES / "stages") or None
    if tracking.tags is None:
        tracking.tags = list(dict.fromkeys(stem[:LONGEST_TAG] for stem in _stems_of(recipe)))


def _stems_of(recipe: str) -> list[str]:
    return [Path(word).stem if word.endswith((".yaml", ".yml")) else word for word in _words_of(recipe)]


def _words_of(recipe: str) -> list[str]:
    """What + joins; the path of one file may hold a + itself, as the default run folders do."""
    return [recipe] if Path(recipe).is_file() else recipe.split("+")


def _read_overrides(words: list[str]) -> list[tuple[str, dict]]:
    return [(f"override {word}", read_override(word)) for word in words]
