"""What a batch script asks Slurm for, as far as a plan needs it."""

import re
import shlex
from pathlib import Path

from hybrid_megatron.errors import ConfigError

TEMPLATES = {8: "train_8xh200.sbatch", 16: "train_16xh200.sbatch"}
"""The project's own, by their GPUs."""

_NODES = ("--nodes", "-N")
_GPUS_OF_A_NODE = ("--gres", "--gpus-per-node")
_SHORT = {"-N": "--nodes"}


def gpus_of(template: Path, options: list[str]) -> int:
    """GPUs of a job from this script with these options of sbatch, which win over the script's. Raises ConfigError if it does not say."""
    asked = _asked([*_header(template), *options])
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
    """The last value of each option that says how many GPUs: as --name=value, --name value, -N value or -Nvalue."""
    asked, rest = {}, iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if re.fullmatch(r"-N\d+", word):
            name, equals, value = "-N", "=", word[2:]
        if name in (*_NODES, *_GPUS_OF_A_NODE):
            asked[_SHORT.get(name, name)] = value if equals else next(rest, "")
    return asked
