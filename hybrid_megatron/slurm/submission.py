"""A run's job: its folder made ready, sbatch asked."""

import contextlib
import fcntl
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from hybrid_megatron.errors import RunError, UserError
from hybrid_megatron.slurm.checks import check_free
from hybrid_megatron.slurm.cluster_env import ask_sbatch, cluster_env
from hybrid_megatron.slurm.jobs import RECIPE, record, recorded, told_by
from hybrid_megatron.slurm.snapshot import Snapshot, snapshot
from hybrid_megatron.slurm.stage import Stage, write_recipe


def code_with(template: Path) -> Snapshot:
    """The present code, with a batch script that may lie elsewhere, and with cluster.env."""
    extra = {f"slurm/{template.name}": template}
    if cluster_env().is_file():
        extra["slurm/cluster.env"] = cluster_env()
    return snapshot(extra)


def command(stage: Stage, code: Path, template: str, options: list[str], after: str | None) -> list[str]:
    """What is asked of sbatch. The user's own options win, but for --dependency behind another stage: it is meant for the first."""
    run_dir = Path(stage.config.run_dir)
    dependency = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    output = f"{run_dir / 'logs'}/".replace("%", "%%") + "slurm-%j.out"
    ours = [f"--job-name={stage.config.name}", f"--output={output}", f"--chdir={code}"]
    return ["sbatch", "--parsable", *ours, *options, *dependency, str(code / "slurm" / template), str(run_dir / RECIPE), *stage.kept]


def submit(stage: Stage, code: Snapshot, template: str, options: list[str], after: str | None) -> str:
    """The id of the job. Raises RunError if the folder has one already, or if sbatch refuses; the folder is then what it was."""
    run_dir = Path(stage.config.run_dir)
    with _one_at_a_time(run_dir):
        with _undone_if_refused(run_dir, code):
            check_free(run_dir)
            write_recipe(stage.config)
            asked = command(stage, code.write(run_dir), template, options, after)
            said = told_by(ask_sbatch(asked))
        found = re.search(r"\b(\d+)(;\S+)?$", said)  # "id;cluster" where there are several
        if found is None:
            instead = f" but {said.splitlines()[-1]!r}" if said else ""
            raise RunError(
                f"sbatch: it gave no job id{instead}, so nothing is known of a job; look with squeue --me, and at {cluster_env()}"
            )
        job = found[1]
        record(run_dir, job, code=code.hash, options=options, dependency=after)
    return job


@contextlib.contextmanager
def _one_at_a_time(run_dir: Path) -> Iterator[None]:
    """Of two submits in one folder the second sees the first one's job. Makes the folder."""
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        lock = open(run_dir / "jobs.jsonl", "a")
    except OSError as error:
        raise RunError(f"run_dir={run_dir}: cannot write there ({error.strerror}); give another with run_dir=PATH") from None
    with lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _undone_if_refused(run_dir: Path, code: Snapshot) -> Iterator[None]:
    """Where there will be no job: without its recipe and its copy of the code, but for an earlier job's, and the folder if it is new."""
    recipe, jobs, copy = run_dir / RECIPE, run_dir / "jobs.jsonl", run_dir / "code" / code.hash
    earlier, was_there = recipe.read_bytes() if recipe.is_file() else None, copy.is_dir()
    try:
        yield
    except UserError:
        if earlier is None:
            recipe.unlink(missing_ok=True)
        else:
            new = recipe.with_name(f".{RECIPE}.new")
            with contextlib.suppress(OSError):  # on a full disk the later one stays, whole
                new.write_bytes(earlier)
                new.replace(recipe)
        if not was_there:
            shutil.rmtree(copy, ignore_errors=True)
        if not recorded(run_dir):
            jobs.unlink(missing_ok=True)
            for folder in (copy.parent, run_dir / "logs", run_dir):
                with contextlib.suppress(OSError):  # there is something in it
                    folder.rmdir()
        raise
