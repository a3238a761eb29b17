"""RUN_DIR/logs/heartbeats/rank_XXXXX.json: what each rank does, so that a hang has a culprit and anyone can see how far a run is."""

import json
import os
import shutil
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
    step: int
    """Optimizer steps done."""
    phase: str
    micro_batch: int
    """Micro-batches begun in this phase of the step."""
    since: float
    """When the phase began, or its last micro-batch; seconds since the epoch, as the rank's own clock has it, like `time`."""
    time: float
    """When this was written."""
    host: str
    pid: int


def folder_of(run_dir: Path) -> Path:
    return Path(run_dir) / "logs/heartbeats"


def remove_heartbeats(run_dir: Path) -> None:
    """Of an earlier start, with all else in their folder."""
    shutil.rmtree(folder_of(run_dir), ignore_errors=True)


def write_heartbeat(run_dir: Path, beat: Heartbeat) -> None:
    """One small write into a file that keeps its size: no new names for a shared file system to look after. Raises OSError."""
    folder_of(run_dir).mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder_of(run_dir) / f"rank_{beat.rank:05d}.json", os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.pwrite(descriptor, f"{json.dumps(asdict(beat)):<{_FILE_BYTES - 1}}\n".encode(), 0)
    finally:
        os.close(descriptor)  # what makes it visible to other nodes on NFS


def read_heartbeats(run_dir: Path) -> dict[Heartbeat, float]:
    """Each rank's heartbeat and its silence: seconds from it to the newest of all, by the file server's clock.

    One that is just being written is left out.
    """
    written = {}
    for path in sorted(folder_of(run_dir).glob("rank_*.json")):
        try:
            with open(path) as file:
                written[Heartbeat(**json.loads(file.read()))] = os.fstat(file.fileno()).st_mtime
        except (OSError, ValueError, TypeError):
            continue
    return {beat: max(written.values()) - when for beat, when in written.items()}


def culprits(beats: dict[Heartbeat, float], world_size: int) -> set[int]:
    """Ranks that the others wait for: those that are silent or missing, else those furthest behind; none if all are in the same place."""
    silent = {beat.rank for beat, silence in beats.items() if silence > SILENT_SECONDS}
    silent |= set(range(world_size)) - {beat.rank for beat in beats}
    if silent:
        return silent
    places = {beat.rank: (beat.step, PHASES.index(beat.phase)) for beat in beats}
    behind = {rank for rank, place in places.items() if place == min(places.values())}
    return behind if len(behind) < world_size else set()


def describe(beats: dict[Heartbeat, float], world_size: int) -> list[str]:
    """A line for each place where ranks are, the culprits' first."""
    blamed = culprits(beats, world_size)
    waited_for = " <- the others wait for it"
    lines = [f"rank {rank}: no sign of life since the start{waited_for}" for rank in sorted(blamed - {beat.rank for beat in beats})]
    there: dict[tuple, list[Heartbeat]] = {}
    for beat in sorted(beats, key=lambda beat: (beat.rank not in blamed, beat.rank)):
        there.setdefault((beat.rank in blamed, beats[beat] > SILENT_SECONDS, beat.step, beat.phase, beat.micro_batch), []).append(beat)
    for (is_blamed, is_silent, step, phase, micro_batch), group in there.items():
        ranks = ", ".join(str(beat.rank) for beat in group)
        hosts = ", ".join(sorted({beat.host for beat in group}))
        pid = f", pid {group[0].pid}" if len(group) == 1 else ""
        since = time.strftime("%H:%M:%S", time.localtime(min(beat.since for beat in group)))
        lines.append(
            f"rank{'s' if len(group) > 1 else ''} {ranks} ({hosts}{pid}): {phase} after step {step}"
            + (f", micro-batch {micro_batch}" if micro_batch else "")
            + f" since {since}"
            + (f", no sign of life for {max(beats[beat] for beat in group):.0f} s" if is_silent else "")
            + (waited_for if is_blamed else "")
        )
    if not blamed and world_size > 1:
        lines.append("all ranks are in the same place: an operation that all take part in does not end, and the stacks say which")
    return lines
