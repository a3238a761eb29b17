"""The words that a batch script puts between a recipe and its overrides: the layout it takes for a recipe of that name.

They are asked of the script itself, so that what `launch submit` plans and submits is what a plain sbatch of the same words runs. It is
followed to its `run_job`, in an empty folder, with no command but bash's own, in a moment.
"""

import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

from hybrid_megatron.errors import RunError

_RUN_JOB = """run_job() { printf '%s\\0' "$@" >words; exit; }"""
_SECONDS = 20


def words_of_job(template: Path, words: list[str]) -> list[str]:
    """Recipe and overrides as `template` hands them to run_job when sbatch hands it `words`; the same of a script that has none."""
    if "run_job" not in template.read_text():
        return words
    if (bash := shutil.which("bash")) is None:
        raise RunError("bash: not found; the batch scripts need it")
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "words"
        (Path(folder) / "slurm").mkdir()
        (Path(folder) / "slurm/job.sh").write_text(_RUN_JOB.replace(">words", f">{told}") + "\n")
        try:
            subprocess.run(
                [bash, str(template.absolute()), *words],
                cwd=folder,
                env={"PATH": f"{folder}/none"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_SECONDS,
            )
            return told.read_bytes().decode().split("\0")[:-1]
        except (OSError, subprocess.TimeoutExpired):
            warnings.warn(f"{template}: it does not come to its run_job, so a layout that it sets is not in the plan")
            return words
