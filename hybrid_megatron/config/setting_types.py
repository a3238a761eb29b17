"""Plain data of recipes and overrides against the types of schema.py, every misfit in a sentence; and values as recipes have them."""

import dataclasses
import difflib
import types
import typing

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.errors import ConfigError


YAML_RULES = "a text with a colon takes quotes, and brackets and quotes come in pairs"


def override_problems(schema: type, words: list[str]) -> list[str]:
    """What is wrong with each of the overrides `words` by itself: its form, its key, its type."""
    problems = []
    for word in words:
        try:
            problems += type_problems(read_override(word), schema, f"override {word}", schema)
        except ConfigError as error:
            problems += error.problems
    return problems


def read_override(word: str) -> dict:
    if word.startswith("-"):
        raise ConfigError(f"there is no option {word} here; --help says what there is")
    key, equals, value = word.partition("=")
    if not equals or not key or not all(part.isidentifier() for part in key.split(".")):
        raise ConfigError(f"override {word!r} is not of the form section.key=value")
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([word]), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"override {word!r}: its value is not readable as YAML: {said}; {YAML_RULES}") from None


def type_problems(value, expected, where: str, schema: type, key: str = "") -> list[str]:
    """Every place where `value`, plain YAML data, does not fit the type `expected`; `key` is its path in `schema`."""
    said = f"{where}: {key}={repr(value) if isinstance(value, str) else as_written(value)}"
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
                problems.append(f"{where}: {path} is not a setting{_reason_or_nearest(str(name), expected, key, schema)}")
            else:
                problems += type_problems(below, _fields(expected)[name], where, schema, path)
        return problems
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return []
        return type_problems(value, next(a for a in arguments if a is not type(None)), where, schema, key)
    if origin is list:
        if not isinstance(value, list):
            return [f"{said}: this must be a list, in brackets, e.g. {key}=[...]"]
        return [p for i, item in enumerate(value) for p in type_problems(item, arguments[0], where, schema, f"{key}[{i}]")]
    fits = {
        bool: isinstance(value, bool),
        int: isinstance(value, int) and not isinstance(value, bool),
        float: isinstance(value, (int, float)) and not isinstance(value, bool),
        str: isinstance(value, str),
    }[expected]
    words = {
        bool: "true or false",
        int: f"a whole number{_spelled(value, key)}",
        float: f"a number{_spelled(value, key)}",
        str: "a text (YAML takes on, off, yes and no for true and false, and digits for a number; put quotes around it)",
    }
    if isinstance(value, dict):
        short = words[expected].partition(",")[0].partition(" (")[0]
        return [f"{where}: {key} must be {short}, with no {next(iter(value), 'keys')} below it"]
    return [] if fits else [f"{said}: this must be {words[expected]}"]


def as_written(value: object) -> str:
    """A value on one line as a recipe would have it, without what an entry of a list leaves at its default."""
    if dataclasses.is_dataclass(value):
        usual, told = vars(type(value)()), vars(value)
        return as_written({name: one for name, one in told.items() if one != usual[name]})
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {as_written(one)}" for name, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(as_written, value)) + "]"
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def _spelled(value, key: str) -> str:
    """How a number is written, where a text stands for one."""
    if not isinstance(value, str):
        return ""
    if value.strip().lstrip("+-").replace(".", "", 1).isdigit():
        return ", written without quotes"
    return ", such as 4096, 1.5M or 50B" if key.endswith("tokens") else ""


def _fields(cls) -> dict[str, type]:
    return typing.get_type_hints(cls)


def _reason_or_nearest(name: str, section: type, key: str, schema: type) -> str:
    """What follows 'is not a setting': why there is none, where the section says so, or what may have been meant."""
    absent = getattr(section, "absent", {})
    return f": {absent[name]}; {key} has {', '.join(_fields(section))}" if name in absent else _suggest(name, _fields(section), key, schema)


def _suggest(word: str, known, section: str = "", schema: type = RunConfig) -> str:
    """'; did you mean X?' for the nearest known name, or for the same name in another section of `schema`."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    if near:
        return f"; did you mean {f'{section}.{near[0]}'.lstrip('.')}?"
    elsewhere = [] if section.endswith("]") else _paths_of(word, schema)  # an entry of a list has its own keys alone
    if section.startswith("model."):  # nor does another mixer's setting do anything for this one
        elsewhere = [path for path in elsewhere if not (path.startswith("model.") and path.count(".") > 1)]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; {f'{section} has' if section else 'settings are'} {', '.join(known)}"


def _paths_of(word: str, cls, prefix: str = "") -> list[str]:
    """Key paths anywhere in the schema whose last part is (nearly) `word`."""
    found = []
    for name, kind in _fields(cls).items():
        if difflib.get_close_matches(word, [name], cutoff=0.8):
            found.append(prefix + name)
        if dataclasses.is_dataclass(kind):
            found += _paths_of(word, kind, f"{prefix}{name}.")
    return found
