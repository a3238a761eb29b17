"""python -m launch cancel RUN_DIR [--now]

Ends the jobs of a run folder for good, those that wait at once. One that runs saves a checkpoint at the end of its step first and is not
requeued; --now does not wait for that. Stages that wait for its completion end with it. The same submitted again goes on.
"""

import sys
from pathlib import Path

from hybrid_megatron.errors import ConfigError, exit_with_code_2
from hybrid_megatron.slurm.jobs import active_jobs, ask_slurm, told_by
from launch.words import help_if_asked


def main(words: list[str]) -> None:
    help_if_asked(__doc__, words)
    with exit_with_code_2():
        folders = [word for word in words if word != "--now"]
        if len(folders) != 1 or folders[0].startswith("-"):
            raise ConfigError("cancel takes one run folder and --now, e.g. python -m launch cancel runs/NAME")
        _cancel(Path(folders[0]), "--now" in words)


def _cancel(run_dir: Path, now: bool) -> None:
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such folder; name the run folder of a job")
    jobs = active_jobs(run_dir)
    if not jobs:
        print(f"nothing    no job of {run_dir} runs or waits")
    for job in jobs:
        politely = job.state == "RUNNING" and not now
        told_by(ask_slurm(["scancel", *(["--batch", "--signal=USR2"] if politely else []), job.id]))
        what = "saves at the end of its step and ends; python -m launch status shows when" if politely else "is ended"
        print(f"cancelled  job {job.id} ({job.state.lower()}): it {what}")


if __name__ == "__main__":
    main(sys.argv[1:])
