"""python -m launch status RUN_DIR [--json]

Says how the jobs and the training of a run folder go: what Slurm knows of the jobs, how each of their starts ended, steps, tokens, loss,
pace and time left, the newest checkpoint, the last events, and what every rank did last.
"""

import json
import sys
from pathlib import Path

from hybrid_megatron.errors import ConfigError, exit_with_code_2
from hybrid_megatron.quantities import human_hours
from hybrid_megatron.slurm.status import run_status
from launch.words import help_if_asked


def main(words: list[str]) -> None:
    help_if_asked(__doc__, words)
    with exit_with_code_2():
        folders = [word for word in words if word != "--json"]
        if len(folders) != 1 or folders[0].startswith("-"):
            raise ConfigError("status takes one run folder and --json, e.g. python -m launch status runs/NAME")
        status = run_status(Path(folders[0]))
        print(json.dumps(status, indent=2) if "--json" in words else report(status))


def report(status: dict) -> str:
    return "\n".join([f"run        {status['run_dir']}", *_jobs(status), *_progress(status), *_events(status), *_heartbeats(status)])


def _jobs(status: dict) -> list[str]:
    lines = [f"slurm      {status['slurm']}"] if status["slurm"] else []
    for job in status["jobs"]:
        if job["state"] is None:
            told = "no longer known to Slurm" if not status["slurm"] else "its state is not known"
        elif job["state"] == "PENDING":
            told = f"pending ({job['reason']})"
        elif job["state"] == "RUNNING":
            told = f"running for {job['elapsed']} on {job['nodes']}, {job['left']} left"
            told += f", asked at {job['cancelled']} to save and end" if job["cancelled"] else ""
        else:
            told = job["state"].lower()
        lines.append(f"job        {job['id']}: {told}" + (f"; training: {job['outcome']}" if job["outcome"] else ""))
        lines += [f"           {attempt}" for attempt in job["attempts"]]
    return lines or ["job        none was submitted for this folder"]


def _progress(status: dict) -> list[str]:
    lines = [f"step       {status['step']:,} of {_or_unknown(status['steps'], ',')}, {status['tokens']:,} tokens"]
    if status["loss"] is not None:
        validated = "" if status["validation_loss"] is None else f", validation loss {status['validation_loss']:.4f}"
        lines.append(f"loss       {status['loss']:.4f}{validated}; last step {_ago(status['metrics_age_seconds'])}")
    if status["tokens_per_second"]:
        left = f", {human_hours(status['hours_left'])} left" if status["hours_left"] else ""
        lines.append(f"pace       {status['tokens_per_second']:,.0f} tokens a second{left}")
    return [*lines, f"checkpoint {status['checkpoint'] or 'none yet'}"]


def _events(status: dict) -> list[str]:
    lines = []
    for event in status["events"]:
        facts = ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("time", "event"))
        lines.append(f"event      {event.get('time', '')} {event.get('event', '')}" + (f": {facts}" if facts else ""))
    return lines


def _heartbeats(status: dict) -> list[str]:
    return [
        f"rank {beat['rank']:<6}{beat['phase']} after step {beat['step']:,} on {beat['host']}, written {_ago(beat['age_seconds'])}"
        for beat in status["heartbeats"]
    ]


def _or_unknown(number: int | None, form: str) -> str:
    return "an unknown number" if number is None else format(number, form)


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "at an unknown time"
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.1f} h ago"


if __name__ == "__main__":
    main(sys.argv[1:])
