"""What a batch script asks Slurm for, as far as a plan needs it."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from hybrid_megatron.errors import ConfigError

TEMPLATES = {8: "train_8xh200.sbatch", 16: "train_16xh200.sbatch"}
"""The project's own, by their GPUs."""

_NODES = ("--nodes", "-N")
_GPUS_OF_A_NODE = ("--gres", "--gpus-per-node")
_SHORT = {"-N": "--nodes", "-G": "--gpus"}
_NOT_BY_NODE = ("--gpus", "-G", "--gpus-per-task", "--gpus-per-socket")
"""Slurm takes them beside --gres, and leaves to itself how many GPUs each node has."""
_VARIABLES = ("SBATCH_GRES", "SBATCH_GPUS_PER_NODE", "SBATCH_GPUS", "SBATCH_GPUS_PER_TASK")


def gpus_of(template: Path, options: list[str], environment: Mapping[str, str] = MappingProxyType({})) -> int:
    """GPUs of a job from this script. The options of sbatch win over its variables in `environment`, and these over the script's.

    Raises ConfigError if they do not say how many, or not by node.
    """
    variables = [f"--{name[7:].lower().replace('_', '-')}={environment[name]}" for name in _VARIABLES if name in environment]
    places = {
        f"{template}: #SBATCH ": _header(template),
        "the environment or cluster.env, as a variable SBATCH_*: ": variables,
        "": options,
    }
    for place, words in places.items():
        for name, value in _asked(words).items():
            if name in _NOT_BY_NODE:
                raise ConfigError(
                    f"{place}{name}={value}: a job's GPUs are asked for by node, the same number of each; say --gres=gpu:N or "
                    "--gpus-per-node=N instead, and --nodes=N"
                )
    asked = _asked([word for words in places.values() for word in words])
    try:
        nodes = int(asked.get("--nodes", "1").split("-")[0])
        if "--gpus-per-node" in asked:
            return nodes * int(asked["--gpus-per-node"].rpartition(":")[2])
        return nodes * int(re.search(r"\bgpu(?::\w+)?:(\d+)", asked["--gres"])[1])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{template}: its #SBATCH lines and the options behind -- do not say how many GPUs a job has; they need "
            "--nodes=N and --gres=gpu:N or --gpus-per-node=N"
        ) from None


def _header(template: Path) -> list[str]:
    try:
        lines = template.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--template {template}: cannot be read ({getattr(error, 'strerror', None) or 'no text'})") from None
    return [word for line in lines if line.startswith("#SBATCH ") for word in shlex.split(line.removeprefix("#SBATCH"), comments=True)]


def _asked(words: list[str]) -> dict[str, str]:
    """The last value of each option that says how many GPUs: as --name=value, --name value, -N value or -Nvalue, -G too."""
    asked, rest = {}, iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if re.fullmatch(r"-(N\d|G\w).*", word):
            name, equals, value = word[:2], "=", word[2:]
        if name in (*_NODES, *_GPUS_OF_A_NODE, *_NOT_BY_NODE):
            asked[_SHORT.get(name, name)] = value if equals else next(rest, "")
    return asked
