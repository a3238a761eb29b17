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
import dataclasses
import difflib
import hashlib
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.errors import ConfigError
from hybrid_megatron.quantities import parse_count

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
FOLDERS = ("", "models", "patterns", "stages", "variants")


def _times(value: int, numerator: int, denominator: int) -> int:
    return value * numerator // denominator


OmegaConf.register_resolver("times", _times)


def load_recipe(words: list[str], beneath: dict | None = None) -> RunConfig:
    """Read a recipe as typed on a command line, e.g. ["776m+gdn_nope_lh+pretrain_4k", "parallel.tensor=2"].

    The first word is the recipe, or STUDY:RUN, the others are overrides; `beneath`, a tree of settings, lies under every file, for a caller
    that can do without some of them. Raises ConfigError with every unknown key, wrong type and missing value. Rules between settings are
    checked by `validate`, which also needs the number of processes.
    """
    if not words:
        raise ConfigError("no recipe given: name a YAML file or fragments joined by +, e.g. 776m+gdn_nope_lh+pretrain_4k")
    if _names_a_run(words[0]):
        from hybrid_megatron.config.studies import find_run  # here, since studies are made of recipes

        words = [*find_run(words[0]).arguments(), *words[1:]]
    recipe, overrides = words[0], words[1:]
    files = [("defaults", beneath or {})] + [(path.name, read_yaml(path)) for path in _files_of(recipe)]
    return _filled(RunConfig, files + _read_overrides(overrides), recipe, lambda merged: _name_the_run(merged, recipe, overrides))


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
    problems = [problem for where, tree in layers for problem in _type_problems(tree, schema, where, schema)]
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


def override_problems(schema: type, words: list[str]) -> list[str]:
    """What is wrong with each of the overrides `words` by itself: its form, its key, its type."""
    problems = []
    for word in words:
        try:
            problems += _type_problems(_read_override(word), schema, f"override {word}", schema)
        except ConfigError as error:
            problems += error.problems
    return problems


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
    stem = "+".join(Path(word).stem if word.endswith((".yaml", ".yml")) else word for word in _words_of(recipe))
    if OmegaConf.is_missing(merged, "name"):
        merged.name = stem
    told = sorted(word for word in overrides if word.split("=")[0] not in ("name", "run_dir"))
    variant = "-" + hashlib.sha256("\n".join(told).encode()).hexdigest()[:8] if told else ""
    if OmegaConf.is_missing(merged, "run_dir"):
        merged.run_dir = f"runs/{merged.name}{variant}"


def _words_of(recipe: str) -> list[str]:
    """What + joins; the path of one file may hold a + itself, as the default run folders do."""
    return [recipe] if Path(recipe).is_file() else recipe.split("+")


def _files_of(recipe: str) -> list[Path]:
    """The files a recipe is made of, undermost first, each once: all bases, then the words in order."""
    words = [find_fragment(word) for word in _words_of(recipe)]
    bases: list[Path] = []

    def lay_under(path: Path, beneath: tuple[Path, ...]) -> None:
        if path in beneath:
            raise ConfigError(f"bases of {path.name} lead back to itself: {' -> '.join(p.name for p in (*beneath, path))}; remove one")
        for name in read_yaml(path, with_bases=True).get("bases") or []:
            base = find_fragment(str(name), beside=path.parent)
            lay_under(base, (*beneath, path))
            if base not in bases:
                bases.append(base)

    for path in words:
        lay_under(path, ())
    return [base for base in bases if base not in words] + words


def find_fragment(word: str, beside: Path | None = None) -> Path:
    """The file of one word of a recipe. Raises ConfigError if there is none, with the nearest name."""
    if word.endswith((".yaml", ".yml")) or "/" in word:
        for folder in filter(None, (beside, Path())):
            if (folder / word).is_file():
                return (folder / word).resolve()
        raise ConfigError(f"recipe file {word} does not exist; give the path of a YAML file or fragment names from {RECIPES.name}/")
    for folder in FOLDERS:
        path = RECIPES / folder / f"{word}.yaml"
        if path.is_file():
            return path
    known = sorted(path.stem for folder in FOLDERS for path in (RECIPES / folder).glob("*.yaml"))
    raise ConfigError(f"recipe fragment {word!r} is not known{nearest(word, known)}; recipes/README.md lists all fragments")


def read_yaml(path: Path, with_bases: bool = False) -> dict:
    """A file's mapping as plain data. Raises ConfigError."""
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not tree:
        raise ConfigError(f"{path}: the file holds no settings")
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of settings, this file holds a {type(tree).__name__}")
    bases = tree.get("bases")
    if bases is not None and not (isinstance(bases, list) and all(isinstance(base, str) for base in bases)):
        raise ConfigError(f"{path}: bases must be a list of fragment names or paths, not {bases!r}")
    return tree if with_bases else {key: value for key, value in tree.items() if key != "bases"}


def _read_overrides(words: list[str]) -> list[tuple[str, dict]]:
    return [(f"override {word}", _read_override(word)) for word in words]


def _read_override(word: str) -> dict:
    key, equals, value = word.partition("=")
    if not equals or not key or not all(part.isidentifier() for part in key.split(".")):
        raise ConfigError(f"override {word!r} is not of the form section.key=value")
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([word]), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"override {word!r}: {' '.join(str(error).split())}") from None


def _type_problems(value, expected, where: str, schema: type, key: str = "") -> list[str]:
    """Every place where `value`, plain YAML data, does not fit the type `expected`; `key` is its path in `schema`."""
    said = f"{where}: {key}={value!r}"
    if isinstance(value, str) and value.startswith("${") and not dataclasses.is_dataclass(expected):
        return []  # an interpolation; its result is checked by OmegaConf
    if value == MISSING:
        return []
    if dataclasses.is_dataclass(expected):
        if not isinstance(value, dict):
            return [f"{said}: this is a section with keys {', '.join(_fields(expected))}, not a single value"]
        problems = []
        for name, below in value.items():
            path = f"{key}.{name}".lstrip(".")
            if name not in _fields(expected):
                problems.append(f"{where}: {path} is not a setting{_suggest(str(name), _fields(expected), key, schema)}")
            else:
                problems += _type_problems(below, _fields(expected)[name], where, schema, path)
        return problems
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return []
        return _type_problems(value, next(a for a in arguments if a is not type(None)), where, schema, key)
    if origin is list:
        if not isinstance(value, list):
            return [f"{said}: this must be a list, in brackets, e.g. {key}=[...]"]
        return [p for i, item in enumerate(value) for p in _type_problems(item, arguments[0], where, schema, f"{key}[{i}]")]
    fits = {
        bool: isinstance(value, bool),
        int: isinstance(value, int) and not isinstance(value, bool),
        float: isinstance(value, (int, float)) and not isinstance(value, bool),
        str: isinstance(value, str),
    }[expected]
    words = {
        bool: "true or false",
        int: "a whole number, written without quotes",
        float: "a number, written without quotes",
        str: "a text (YAML takes on, off, yes and no for true and false, and digits for a number; put quotes around it)",
    }
    return [] if fits else [f"{said}: this must be {words[expected]}"]


def _fields(cls) -> dict[str, type]:
    return typing.get_type_hints(cls)


def nearest(word: str, known) -> str:
    """'; did you mean X?' for the nearest known name, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _suggest(word: str, known, section: str = "", schema: type = RunConfig) -> str:
    """'; did you mean X?' for the nearest known name, or for the same name in another section of `schema`."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    if near:
        return f"; did you mean {f'{section}.{near[0]}'.lstrip('.')}?"
    elsewhere = _paths_of(word, schema)
    return f"; did you mean {elsewhere[0]}?" if elsewhere else (f"; {section} has {', '.join(known)}" if section else "")


def _paths_of(word: str, cls, prefix: str = "") -> list[str]:
    """Key paths anywhere in the schema whose last part is (nearly) `word`."""
    found = []
    for name, kind in _fields(cls).items():
        if difflib.get_close_matches(word, [name], cutoff=0.8):
            found.append(prefix + name)
        if dataclasses.is_dataclass(kind):
            found += _paths_of(word, kind, f"{prefix}{name}.")
    return found
