"""cluster.env: what is particular to this cluster, as bash reads it for sbatch, and for the job."""

import os
import subprocess
from pathlib import Path

from hybrid_megatron.code_version import ROOT
from hybrid_megatron.errors import ConfigError
from hybrid_megatron.slurm.jobs import ask_slurm

VARIABLE = "HYBRID_MEGATRON_CLUSTER"

_WITH_CLUSTER_ENV = 'set -a; [[ ! -e $1 ]] || source "$1" >&2; set +a; exec "${@:2}"'

# Whoever sources a file goes on behind a `return`, and ends with an `exit`, without a word. Functions, and files that it
# sources itself, may return.
_TRIAL = r"""
told() { echo "line $1: $2" >&3; exit 1; }
watch() {
    [[ $2 =~ ^(exit|return)($|[[:space:]]) && $BASH_SUBSHELL == 0 ]] || return 0
    if [[ $2 == exit* || $3 == 1 ]]; then told "$1" "$2"; fi
}
exec 3>&1
set -T
trap 'watch "$LINENO" "$BASH_COMMAND" "${#BASH_SOURCE[@]}"' DEBUG
source "$1" >/dev/null
trap - DEBUG
echo read >&3
"""


def cluster_env() -> Path:
    """The file; without one it is the name of none."""
    return Path(os.environ.get(VARIABLE) or ROOT / "slurm/cluster.env")


def check_cluster_env() -> None:
    """Raise ConfigError unless the file, if there is to be one, can be read to its end."""
    file = cluster_env()
    if not file.is_file():
        if os.environ.get(VARIABLE) or file.exists():
            raise ConfigError(f"{VARIABLE}={file}: there is no such file; correct the path, or unset it for {ROOT / 'slurm/cluster.env'}")
        return
    syntax = ask_slurm(["bash", "-n", str(file)])
    if syntax.returncode:
        raise ConfigError(f"{file}: bash cannot read it ({(syntax.stderr.strip().splitlines() or ['no reason given'])[0]}); correct it")
    trial = ask_slurm(["bash", "-c", _TRIAL, "bash", str(file)], env=_environment())
    told = trial.stdout.strip().splitlines()[-1:]
    if told != ["read"]:
        where = "".join(told) or " ".join(trial.stderr.split()) or f"exit code {trial.returncode}"
        raise ConfigError(f"{file}: it ends the shell that reads it, or hides what stands behind ({where}); leave out exit and return")


def ask_sbatch(command: list[str]) -> subprocess.CompletedProcess:
    """sbatch with the variables of cluster.env, which it takes for options."""
    ended = ask_slurm(["bash", "-c", _WITH_CLUSTER_ENV, "sbatch", str(cluster_env()), *command], env=_environment())
    ended.args = command
    return ended


def _environment() -> dict[str, str]:
    """A job's settings do not come from the shell that submits, but from the copy of cluster.env beside its code."""
    return {key: value for key, value in os.environ.items() if key not in (VARIABLE, "PYTHONPATH")}
