"""How a run goes, from its folder and from Slurm alone: nothing is asked of the job, and nothing heavy is imported."""

import contextlib
import json
import time
from pathlib import Path

from hybrid_megatron.checkpoint.store import CheckpointStore
from hybrid_megatron.config import load_recipe
from hybrid_megatron.errors import RunError, UserError
from hybrid_megatron.slurm.jobs import RECIPE, TIME, check_run_folder, known_to_slurm, recorded

_TAIL_BYTES = 1 << 16
_STEPS_OF_A_RATE = 50
_EVENTS = 6


def run_status(run_dir: Path) -> dict:
    """What `launch status --json` prints. Raises ConfigError where there is no run folder.

    run_dir; step, steps, tokens, loss, validation_loss, metrics_age_seconds; tokens_per_second, hours_left, at the pace of the last steps;
    checkpoint, the newest; jobs, oldest first: id, submitted, cancelled, state, reason, nodes, elapsed, left, outcome, attempts; slurm, why
    there is nothing of it; events, the last ones; heartbeats: rank, host, phase, step, age_seconds. What is not known is null.
    """
    check_run_folder(run_dir)
    newest = CheckpointStore(run_dir).newest()
    jobs, slurm = _jobs(run_dir)
    return {
        "run_dir": str(run_dir),
        **_progress(run_dir),
        "checkpoint": newest and newest.name,
        "jobs": jobs,
        "slurm": slurm,
        "events": _tail(run_dir / "events.jsonl")[-_EVENTS:],
        "heartbeats": _heartbeats(run_dir),
    }


def _progress(run_dir: Path) -> dict:
    lines = _tail(run_dir / "metrics.jsonl")
    last = lines[-1] if lines else {}
    validated = next((line["validation_loss"] for line in reversed(lines) if "validation_loss" in line), None)
    steps, budget = _planned(run_dir)
    recent = lines[-_STEPS_OF_A_RATE - 1 :]
    seconds = sum(line["step_seconds"] for line in recent[1:])
    rate = (recent[-1]["tokens"] - recent[0]["tokens"]) / seconds if seconds else None
    return {
        "step": last.get("step", 0),
        "steps": steps,
        "tokens": last.get("tokens", 0),
        "loss": last.get("loss"),
        "validation_loss": validated,
        "metrics_age_seconds": _age(run_dir / "metrics.jsonl"),
        "tokens_per_second": rate,
        "hours_left": max(budget - last["tokens"], 0) / rate / 3600 if rate and budget else None,
    }


def _planned(run_dir: Path) -> tuple[int | None, int | None]:
    """Steps and tokens of the whole run."""
    for name in (RECIPE, "config.yaml"):
        if (run_dir / name).is_file():
            with contextlib.suppress(UserError):
                config = load_recipe([str(run_dir / name)])
                return config.num_steps, config.train.tokens
    return None, None


def _jobs(run_dir: Path) -> tuple[list[dict], str | None]:
    entries, slurm, known = recorded(run_dir), None, {}
    try:
        known = known_to_slurm([entry["id"] for entry in entries])
    except RunError as error:
        slurm = str(error)
    jobs = []
    for entry in entries:
        own, job = run_dir / "logs" / f"job_{entry['id']}", known.get(entry["id"])
        of_slurm = {name: getattr(job, name, None) for name in ("state", "reason", "nodes", "elapsed", "left")}
        outcome, attempts = _lines(own / "outcome"), _lines(own / "attempts")
        training = {"outcome": (outcome or [None])[0], "attempts": attempts}
        jobs.append({"id": entry["id"], "submitted": entry.get("time"), "cancelled": _cancelled(entry, own), **of_slurm, **training})
    return jobs, slurm


def _cancelled(entry: dict, logs: Path) -> str | None:
    """When the end was first asked for: by `launch cancel`, or by its signal alone, which the job has noted."""
    if (noted := logs / "cancelled").exists():
        return entry.get("cancelled") or time.strftime(TIME, time.localtime(noted.stat().st_mtime))
    return entry.get("cancelled")


def _heartbeats(run_dir: Path) -> list[dict]:
    beats = []
    for path in sorted((run_dir / "logs/heartbeats").glob("rank_*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            beat = json.loads(path.read_text())
            beats.append({name: beat[name] for name in ("rank", "host", "phase", "step")} | {"age_seconds": _age(path)})
    return beats


def _tail(path: Path) -> list[dict]:
    """The last lines of a file of JSON lines; what was cut off is left out."""
    try:
        with open(path, "rb") as file:
            file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
            raw = file.read().splitlines()
    except OSError:
        return []
    lines = []
    for line in raw:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return [line for line in lines if isinstance(line, dict)]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _age(path: Path) -> float | None:
    """Seconds since it was written, by this machine's clock."""
    try:
        return round(time.time() - path.stat().st_mtime, 1)
    except OSError:
        return None
