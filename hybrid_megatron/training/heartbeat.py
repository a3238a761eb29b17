"""RUN_DIR/logs/heartbeats/rank_XXXXX.json: what each rank does, so that a hang has a culprit and anyone can see how far a run is."""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

PERIOD_SECONDS = 5.0
SILENT_SECONDS = 3 * PERIOD_SECONDS
"""A rank that has not written for so long, while another has, is dead, stands still, or cannot reach the run folder."""

PHASES = ("starting", "loading", "data", "forward_backward", "optimizer", "validation", "logging", "saving", "ending", "ended")
"""In the order in which a rank passes them; of ranks in one step, one in an earlier phase keeps the others waiting."""

_FILE_BYTES = 512


@dataclass(frozen=True)
class Heartbeat:
    rank: int
    holding: int
    """`RunFolder.holding`: tells the processes of this start from those of earlier ones."""
    step: int
    """Optimizer steps done."""
    phase: str
    micro_batch: int
    """Micro-batches begun in the phases data and forward_backward of this step."""
    since: float
    """When the phase began, or its last micro-batch; seconds since the epoch, as the rank's own clock has it, like `time`."""
    time: float
    """When this was written."""
    host: str
    pid: int
    silent: float = 0.0
    """Seconds, by the file server's clock, from here to the newest heartbeat of all ranks."""


def folder_of(run_dir: Path) -> Path:
    return Path(run_dir) / "logs/heartbeats"


def write_heartbeat(run_dir: Path, beat: Heartbeat) -> None:
    """One small write into a file that keeps its size: no new names for a shared file system to look after. Raises OSError."""
    folder = folder_of(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    line = json.dumps({key: value for key, value in asdict(beat).items() if key != "silent"})
    descriptor = os.open(folder / f"rank_{beat.rank:05d}.json", os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.pwrite(descriptor, f"{line:<{_FILE_BYTES - 1}}\n".encode(), 0)
    finally:
        os.close(descriptor)  # what makes it visible to other nodes on NFS


def read_heartbeats(run_dir: Path) -> list[Heartbeat]:
    """Of the newest start, by rank; one that is just being written is left out."""
    found = []
    for path in sorted(folder_of(run_dir).glob("rank_*.json")):
        try:
            with open(path) as file:
                found.append((os.fstat(file.fileno()).st_mtime, json.loads(file.read())))
        except (OSError, ValueError):
            continue
    holding = max((facts["holding"] for _, facts in found), default=0)
    found = [(written, facts) for written, facts in found if facts["holding"] == holding]
    newest = max((written for written, _ in found), default=0.0)
    return [Heartbeat(**facts, silent=newest - written) for written, facts in found]


def culprits(beats: list[Heartbeat], world_size: int) -> list[int]:
    """Ranks that the others wait for: those that are silent, else those furthest behind; none if all are in the same place."""
    silent = [beat.rank for beat in beats if beat.silent > SILENT_SECONDS]
    if missing := set(range(world_size)) - {beat.rank for beat in beats}:
        silent += missing
    if silent:
        return sorted(silent)
    places = {beat.rank: (beat.step, PHASES.index(beat.phase)) for beat in beats}
    furthest_back = min(places.values(), default=None)
    behind = [rank for rank, place in places.items() if place == furthest_back]
    return behind if len(behind) < len(places) else []


def describe(beats: list[Heartbeat], world_size: int) -> list[str]:
    """A line for each place where ranks are, the culprits' first."""
    blamed = culprits(beats, world_size)
    lines, places = [], {}
    for beat in sorted(beats, key=lambda beat: (beat.rank not in blamed, beat.rank)):
        at = (beat.rank in blamed, beat.silent > SILENT_SECONDS, beat.step, beat.phase, beat.micro_batch)
        places.setdefault(at, []).append(beat)
    for rank in sorted(set(range(world_size)) - {beat.rank for beat in beats}):
        lines.append(f"rank {rank}: no sign of life since the start <- the others wait for it")
    for (is_blamed, is_silent, step, phase, micro_batch), there in places.items():
        first = there[0]
        hosts = sorted({f"{beat.host} (pid {beat.pid})" if len(there) == 1 else beat.host for beat in there})
        where = f"{phase} after step {step}" + (f", micro-batch {micro_batch}" if micro_batch else "")
        seconds = max(beat.time - beat.since for beat in there)
        since = time.strftime("%H:%M:%S", time.localtime(min(beat.since for beat in there)))
        life = f", no sign of life for {first.silent:.0f} s" if is_silent else ""
        lines.append(
            f"{_ranks([beat.rank for beat in there])} on {', '.join(hosts)}: {where} since {since} ({seconds:.0f} s){life}"
            + (" <- the others wait for it" if is_blamed else "")
        )
    if not blamed and world_size > 1:
        lines.append("all ranks are in the same place: an operation that all take part in does not end, and the stacks say which")
    return lines


def _ranks(numbers: list[int]) -> str:
    """E.g. "ranks 0, 2-7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    said = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(numbers) > 1 else ''} {said}"
