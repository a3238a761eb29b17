"""The checkpoint that the run will begin with, its own newest or that of `init_from`: whole and seen alike by every node.

Whole: its marker, every file that its hashes name, and every file as long as its metadata says. Hashes themselves are checked at loading.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader

from hybrid_megatron.checkpoint.integrity import HASHES
from hybrid_megatron.checkpoint.store import CheckpointStore, checkpoint_at, read_progress
from hybrid_megatron.checkpoint.untrusted import no_code_from_files
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.errors import UserError
from hybrid_megatron.preflight.finding import Finding, Level, fine
from hybrid_megatron.preflight.seen import Seen, judge_seen, see

_CACHE_SECONDS = 10.0
"""How long a node looks again for what another node may have written just now, where a network file system keeps old listings."""


@dataclass(frozen=True)
class Origin:
    """Where the run begins, as the first rank sees it."""

    kind: str
    """`newest checkpoint`, `init_from`, or `seed`."""
    path: str = ""
    problem: str = ""
    """Why there is no such checkpoint."""
    steps: int = 0
    """Done already, by the run's own newest checkpoint."""
    existing: int = 0
    """Own complete checkpoints that will go as new ones come."""


def find_origin(config: RunConfig) -> Origin:
    own = CheckpointStore(Path(config.run_dir)).complete()
    if own:
        steps, interval = [int(path.name.rpartition("_")[2]) for path in own], permanent_interval(config)
        return Origin("newest checkpoint", str(own[-1]), "", steps[-1], sum(not interval or step % interval > 0 for step in steps))
    if config.init_from is None:
        return Origin("seed")
    try:
        return Origin("init_from", str(checkpoint_at(Path(config.init_from))))
    except UserError as error:
        return Origin("init_from", config.init_from, f"init_from={error}")


def permanent_interval(config: RunConfig) -> int | None:
    """Steps between two checkpoints that stay for ever; None where there are none."""
    return getattr(config.checkpoint, "permanent_interval_steps", None)


def see_origin(origin: Origin) -> Seen | None:
    """What this node sees of it; None where nothing is read."""
    if origin.kind == "seed":
        return None
    checkpoint = Path(origin.path)
    if origin.problem:
        return see(checkpoint, [], problem=origin.problem)
    then = "give another checkpoint" if origin.kind == "init_from" else None
    seen, end = _seen(checkpoint, then), time.monotonic() + _CACHE_SECONDS
    while seen.problem and seen.file_system.network and time.monotonic() < end:
        time.sleep(1)
        seen = _seen(checkpoint, then)
    return seen


def judge_origin(origin: Origin, seen: dict[str, Seen | None]) -> list[Finding]:
    if origin.kind == "seed":
        return [fine("checkpoint", "none yet: the run begins from its seed")]
    # A damaged one of the run's own does not stop it: it takes an older one.
    blamed = Level.WARNING if origin.kind == "newest checkpoint" else Level.REFUSED
    return judge_seen(origin.kind, {node: each for node, each in seen.items() if each is not None}, blamed)


def _seen(checkpoint: Path, then: str | None) -> Seen:
    try:
        read_progress(checkpoint, then)
        files, problem = sorted(path for path in checkpoint.iterdir() if path.is_file()), _incomplete(checkpoint)
    except UserError as error:
        files, problem = [], str(error)
    return see(checkpoint, files, problem)


def _incomplete(checkpoint: Path) -> str:
    """The first file that is missing or too short; empty if there is none."""
    try:
        named = json.loads((checkpoint / HASHES).read_text())["files"]
        least = dict.fromkeys(map(str, named), 0) | _lengths(checkpoint)
    except Exception as error:  # json, pickle and torch each have exceptions of their own for a damaged file
        return f"{checkpoint}: it cannot be read ({(str(error).splitlines() or [type(error).__name__])[0]})"
    for name, length in sorted(least.items()):
        file = checkpoint / Path(name).name
        if not file.is_file():
            return f"{file}: missing, so the checkpoint is not whole"
        if file.stat().st_size < length:
            return f"{file}: {file.stat().st_size:,} bytes, and at least {length:,} were written, so the checkpoint is not whole"
    return ""


def _lengths(checkpoint: Path) -> dict[str, int]:
    """Bytes that each shard file must have at least."""
    lengths: dict[str, int] = {}
    with no_code_from_files():
        metadata = FileSystemReader(str(checkpoint)).read_metadata()
    for info in metadata.storage_data.values():
        lengths[info.relative_path] = max(lengths.get(info.relative_path, 0), info.offset + info.length)
    return lengths
