"""Words of recipes -> the YAML files they stand for."""

import difflib
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybrid_megatron.config.setting_types import YAML_RULES
from hybrid_megatron.errors import ConfigError

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
FOLDERS = ("", "models", "patterns", "stages", "variants")


def files_of(words: list[str]) -> list[Path]:
    """The files that a recipe of these words is made of, undermost first, each once: all bases, then the words in order."""
    named = [find_fragment(word) for word in words]
    bases: list[Path] = []

    def lay_under(path: Path, beneath: tuple[Path, ...]) -> None:
        if path in beneath:
            raise ConfigError(f"bases of {path.name} lead back to itself: {' -> '.join(p.name for p in (*beneath, path))}; remove one")
        for name in read_yaml(path, with_bases=True).get("bases") or []:
            base = find_fragment(str(name), beside=path.parent)
            lay_under(base, (*beneath, path))
            if base not in bases:
                bases.append(base)

    for path in named:
        lay_under(path, ())
    return [base for base in bases if base not in named] + named


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
        said = " ".join(str(error).split())
        raise ConfigError(f"{path}: not readable as YAML: {said}; mend the file there ({YAML_RULES})") from None
    if not tree:
        raise ConfigError(f"{path}: the file holds no settings")
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of settings, this file holds a {type(tree).__name__}")
    bases = tree.get("bases")
    if bases is not None and not (isinstance(bases, list) and all(isinstance(base, str) for base in bases)):
        raise ConfigError(f"{path}: bases must be a list of fragment names or paths, not {bases!r}")
    return tree if with_bases else {key: value for key, value in tree.items() if key != "bases"}


def nearest(word: str, known) -> str:
    """'; did you mean X?' for the nearest known name, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""
