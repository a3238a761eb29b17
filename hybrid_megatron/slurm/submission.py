"""A run's job: its folder made ready, sbatch asked."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from hybrid_megatron.code_version import ROOT
from hybrid_megatron.config import RunConfig
from hybrid_megatron.errors import RunError
from hybrid_megatron.slurm.jobs import RECIPE, ask_slurm, record, told_by
from hybrid_megatron.slurm.snapshot import Snapshot, snapshot
from hybrid_megatron.slurm.stage import check_free, write_recipe

_WITH_CLUSTER_ENV = 'set -a; [[ ! -e $1 ]] || source "$1" >&2; set +a; exec "${@:2}"'


def cluster_env() -> Path:
    """The file that holds what is particular to this cluster; it need not be there."""
    return Path(os.environ.get("HYBRID_MEGATRON_CLUSTER") or ROOT / "slurm/cluster.env")


def code_with(template: Path) -> Snapshot:
    """The present code, with a batch script that may lie elsewhere, and with cluster.env."""
    extra = {f"slurm/{template.name}": template}
    if cluster_env().is_file():
        extra["slurm/cluster.env"] = cluster_env()
    return snapshot(extra)


def command(config: RunConfig, code: Path, template: str, options: list[str], after: str | None) -> list[str]:
    """What is asked of sbatch; the user's own options stand last, so they win."""
    run_dir = Path(config.run_dir)
    dependency = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    ours = [f"--job-name={config.name}", f"--output={run_dir / 'logs' / 'slurm-%j.out'}", f"--chdir={code}", *dependency]
    return ["sbatch", "--parsable", *ours, *options, str(code / "slurm" / template), str(run_dir / RECIPE)]


def submit(config: RunConfig, code: Snapshot, template: str, options: list[str], after: str | None) -> str:
    """The id of the job. Raises RunError if the folder has one already, or if sbatch refuses."""
    run_dir = Path(config.run_dir)
    with _one_at_a_time(run_dir):
        check_free(run_dir)
        write_recipe(config)
        asked = command(config, code.write(run_dir), template, options, after)
        # A job's settings do not come from the shell that submits, but from the copy of cluster.env beside its code.
        environment = {key: value for key, value in os.environ.items() if key not in ("HYBRID_MEGATRON_CLUSTER", "PYTHONPATH")}
        ended = ask_slurm(["bash", "-c", _WITH_CLUSTER_ENV, "sbatch", str(cluster_env()), *asked], env=environment)
        ended.args = asked
        job = told_by(ended).splitlines()[-1].split(";")[0]  # "id;cluster" where there are several
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
