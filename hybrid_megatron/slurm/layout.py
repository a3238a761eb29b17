"""The words that a batch script puts between a recipe and its overrides: the layout it takes for a recipe of that name.

They are asked of the script itself, so that what `launch submit` plans and submits is what a plain sbatch of the same words runs. It is
followed to its `run_job`, in an empty folder and without a PATH, in a moment. Commands that are not bash's own, such as `module load`, are
left out and count as succeeded; once more they count as failed, and where its words then differ, it is refused.
"""

import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hybrid_megatron.errors import ConfigError, RunError

# What bash reads before the script. Before every command it is made sure of again: profiles that the script reads set a PATH and have a
# `module` of their own. `last` is the script's own line, not one of a function or of a file that it reads; written in place, so that it is
# whole whenever the script is killed.
_TRIAL = r"""
again() {
    PATH=FOLDER/none
    run_job() { printf '%s\0' "$@" >FOLDER/words; exit; }
    command_not_found_handle() { echo "$1" >>FOLDER/unknown; return CODE; }
    module() { command_not_found_handle module; }
    ml() { command_not_found_handle ml; }
    ((BASH_SUBSHELL || ${#BASH_SOURCE[@]} > 2)) || printf '%-300.300s' "line $1, $2" 1<>FOLDER/last
}
readonly -f again
set -T
trap 'again "$LINENO" "$BASH_COMMAND"' DEBUG
"""
_SECONDS = 10


@dataclass(frozen=True)
class Handed:
    """What a batch script hands to run_job."""

    words: list[str]
    """Recipe and overrides."""
    sure: bool
    """Whether it came there without a command that is not bash's own; otherwise the job may take another way."""


def words_of_job(template: Path, words: list[str]) -> Handed:
    """Recipe and overrides as `template` hands them to run_job when sbatch hands it `words`; the same of a script that has none.

    Raises ConfigError if it does not come to its run_job, or if what it hands on depends on commands that are not run.
    """
    if not re.search(r"^[^#\n]*\brun_job\b", template.read_text(), re.MULTILINE):
        return Handed(words, True)
    handed, unknown, last = _followed(template, words, 0)
    if handed is None:
        raise ConfigError(
            f"{template}: tried on this node it ends at {last or 'its first line'}, before its run_job, so the layout that it sets is not "
            "known; put what only a job can do between if [[ -n ${SLURM_JOB_ID:-} ]]; then and fi"
        )
    if unknown:
        otherwise, _, _ = _followed(template, words, 127)
        if otherwise is not None and _settings(otherwise) != _settings(handed):
            differing = " ".join(shlex.quote(word) for word in [*handed, *otherwise] if (word in handed) != (word in otherwise))
            raise ConfigError(
                f"{template}: whether it sets {differing} depends on commands that are not run on this node ({', '.join(unknown)}), so its "
                "layout is not known; let it depend on the script's words alone, or give these settings yourself: words given win"
            )
    return Handed(handed, not unknown)


def _followed(template: Path, words: list[str], code: int) -> tuple[list[str] | None, list[str], str]:
    """What it hands to run_job, the commands left out, which end with `code`, and the last command of the script's own."""
    if (bash := shutil.which("bash")) is None:
        raise RunError("bash: not found; the batch scripts need it")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "slurm").mkdir()
        (folder / "slurm/job.sh").touch()
        (folder / "trial").write_text(_TRIAL.replace("FOLDER", shlex.quote(name)).replace("CODE", str(code)))
        try:
            subprocess.run(
                [bash, str(template.absolute()), *words],
                cwd=folder,
                env={"PATH": f"{folder}/none", "BASH_ENV": f"{folder}/trial"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_SECONDS,
            )
        except subprocess.TimeoutExpired:
            pass  # it waits for something: `last` says where
        handed = _read(folder / "words").split("\0")[:-1] if (folder / "words").is_file() else None
        last = _read(folder / "last").partition("\n")[0].strip()
        return handed, list(dict.fromkeys(_read(folder / "unknown").splitlines())), last


def _read(file: Path) -> str:
    return file.read_bytes().decode(errors="replace") if file.is_file() else ""


def _settings(words: list[str]) -> dict[str, str]:
    """Of several words for one setting the last counts."""
    return dict(word.partition("=")[::2] for word in words)
