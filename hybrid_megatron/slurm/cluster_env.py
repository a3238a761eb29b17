"""cluster.env: what is particular to this cluster, as bash reads it for sbatch, and for the job."""

import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
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
failed() { (($4 == 0)) || echo "failed line $2, $3 (exit code $1)" >&3; }
exec 3>&1
SRUN_OPTIONS=() CONTAINER=()
set -T
trap 'failed "$?" "$LINENO" "${BASH_COMMAND%%$'\\n'*}" "${#BASH_SOURCE[@]}"' ERR
trap 'watch "$LINENO" "$BASH_COMMAND" "${#BASH_SOURCE[@]}"' DEBUG
source "$1" >/dev/null
trap - DEBUG ERR
set +eu
for name in $(compgen -v SBATCH_); do echo "set $name=${!name}" >&3; done
[[ -n "${SRUN_OPTIONS[*]}${CONTAINER[*]}" ]] || echo "set PYTHON=$PYTHON" >&3
echo read >&3
"""

_IMPORT = """
import hybrid_megatron.config
from importlib.util import find_spec
for name in "torch", "megatron.core":
    if find_spec(name) is None:
        raise ModuleNotFoundError(f"No module named '{name}'")
"""
# In a folder that has a .venv as the code of a job does, and with the variables of a job.
_IMPORTING = 'cd "$1" && PYTHONPATH=$2 PYTHONNOUSERSITE=1 exec "$PYTHON" -c "$3"'


def cluster_env() -> Path:
    """The file; without one it is the name of none."""
    return Path(os.environ.get(VARIABLE) or ROOT / "slurm/cluster.env")


def check_cluster_env() -> dict[str, str]:
    """The variables that sbatch takes for options, be they from the file or from the shell that submits.

    Raises ConfigError unless the file, if there is to be one, can be read to its end, and its PYTHON run; warns of commands that fail.
    """
    file = cluster_env()
    if not file.is_file():
        if os.environ.get(VARIABLE) or file.exists():
            raise ConfigError(f"{VARIABLE}={file}: there is no such file; correct the path, or unset it for {ROOT / 'slurm/cluster.env'}")
        return _variables_of_sbatch(os.environ)
    syntax = ask_slurm(["bash", "-n", str(file)])
    if syntax.returncode:
        raise ConfigError(f"{file}: bash cannot read it ({(syntax.stderr.strip().splitlines() or ['no reason given'])[0]}); correct it")
    trial = ask_slurm(["bash", "-c", _TRIAL, "bash", str(file)], env=_environment() | {"PYTHON": ""})
    lines = trial.stdout.strip().splitlines()
    failed = [line.removeprefix("failed ") for line in lines if line.startswith("failed ")]
    if lines[-1:] != ["read"]:
        told = "".join(line for line in lines[-1:] if line.startswith("line "))
        where = told or " ".join(trial.stderr.split()) or f"exit code {trial.returncode}"
        raise ConfigError(f"{file}: it ends the shell that reads it, or hides what stands behind ({where}); leave out exit and return")
    if failed:
        said = [_without_place(line) for line in trial.stderr.splitlines() if line.strip()][:1]
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        warnings.warn(f"{file}: {': '.join([failed[0], *said])}{more}; it is read on, without what that was to set")
    known = dict(line.removeprefix("set ").split("=", 1) for line in lines if re.match(r"set \w+=", line))
    container_in_jobs = re.search(r"^[^#\n]*\b(SRUN_OPTIONS|CONTAINER)\+?=", file.read_text(errors="replace"), re.MULTILINE)
    if known.get("PYTHON") and not container_in_jobs:
        _check_python(file, known["PYTHON"])
    return _variables_of_sbatch(known)


def _check_python(file: Path, python: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / ".venv").symlink_to(sys.prefix)
        importing = ["bash", "-c", _IMPORTING, "bash", folder, str(ROOT), _IMPORT]
        ended = ask_slurm(["bash", "-c", _WITH_CLUSTER_ENV, "bash", str(file), *importing], env=_environment())
    if ended.returncode:
        reason = _without_place((ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1])
        raise ConfigError(
            f"{file}: PYTHON={python} cannot be run on this node or lacks the project's packages ({reason}); name the python of an "
            "environment that make setup made, or leave it out for .venv; one that compute nodes alone have is set behind "
            "if [[ -n ${SLURM_JOB_ID:-} ]]"
        )


def _without_place(line: str) -> str:
    """What bash says of a line, without where."""
    return re.sub(r"^.*?: line \d+: ", "", line)


def _variables_of_sbatch(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("SBATCH_") and value}


def ask_sbatch(command: list[str]) -> subprocess.CompletedProcess:
    """sbatch with the variables of cluster.env, which it takes for options."""
    ended = ask_slurm(["bash", "-c", _WITH_CLUSTER_ENV, "sbatch", str(cluster_env()), *command], env=_environment())
    ended.args = command
    return ended


def _environment() -> dict[str, str]:
    """A job's settings do not come from the shell that submits, but from the copy of cluster.env beside its code."""
    return {key: value for key, value in os.environ.items() if key not in (VARIABLE, "PYTHONPATH")}
