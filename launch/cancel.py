"""python -m launch cancel RUN_DIR [--now]

Ends the jobs of a run folder for good, those that wait at once. One that runs saves a checkpoint at the end of its step first and is not
requeued; --now does not wait for that. Stages that wait for its completion end with it. The same submitted again goes on.
"""

import contextlib
import sys
from pathlib import Path

from hybrid_megatron.command_line import pasted
from hybrid_megatron.errors import ConfigError, exit_with_code_2
from hybrid_megatron.slurm.jobs import active_jobs, ask_slurm, check_run_folder, record_cancelled, recorded, told_by
from launch.words import help_if_asked


def main(words: list[str]) -> None:
    help_if_asked(__doc__, words)
    with exit_with_code_2():
        folders = [word for word in words if word != "--now"]
        if len(folders) != 1 or folders[0].startswith("-"):
            raise ConfigError("cancel takes one run folder and --now, e.g. python -m launch cancel runs/NAME")
        _cancel(Path(folders[0]), "--now" in words)


def _cancel(run_dir: Path, now: bool) -> None:
    check_run_folder(run_dir)
    jobs = active_jobs(run_dir)
    if not jobs:
        print(f"nothing    no job of {run_dir} runs or waits")
    asked = {entry["id"]: entry["cancelled"] for entry in recorded(run_dir) if "cancelled" in entry}
    for job in jobs:
        politely = job.state == "RUNNING" and not now
        told_by(ask_slurm(["scancel", *(["--batch", "--signal=USR2"] if politely else []), job.id]))
        if job.id not in asked:
            with contextlib.suppress(OSError):  # it is asked, whoever may write here
                record_cancelled(run_dir, job.id)
        if politely and job.id in asked:
            what = f"was asked at {asked[job.id]} and now again: it saves at the end of its step and ends; --now does not wait for that"
        elif politely:
            what = f"it saves at the end of its step and ends; {pasted('launch', 'status', run_dir)} shows when"
        else:
            what = "it is ended"
        print(f"cancelled  job {job.id} ({job.state.lower()}): {what}")


if __name__ == "__main__":
    main(sys.argv[1:])
