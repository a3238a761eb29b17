"""SHA-256 hashes of a checkpoint's files, in `integrity.json`, in megatron-core's own form; the ranks share the hashing."""

import hashlib
import json
from pathlib import Path

from hybrid_megatron.checkpoint.store import way_out
from hybrid_megatron.errors import CheckpointError
from hybrid_megatron.parallel import ParallelState

HASHES = "integrity.json"
_ALGORITHM = "sha256"


def hash_share(folder: Path, state: ParallelState, names: list[str]) -> dict[str, str]:
    """This rank's share of the named files and their hashes. Raises OSError."""
    return {name: _sha256(folder / name) for name in names[state.rank :: state.world_size]}


def write_hashes(folder: Path, shares: list[dict[str, str]]) -> None:
    """Write down what all ranks have hashed. Raises OSError."""
    files = {name: digest for share in shares for name, digest in share.items()}
    (folder / HASHES).write_text(json.dumps({"algorithm": _ALGORITHM, "files": dict(sorted(files.items()))}, indent=2) + "\n")


def check_hashes(checkpoint: Path, rank: int = 0, ranks: int = 1, then: str | None = None) -> None:
    """Check share `rank` of `ranks` of the files; raise CheckpointError if one is missing or changed.

    The error ends with the advice `then`, or with how to go on in the checkpoint's own run.
    """
    file = checkpoint / HASHES
    then = then or way_out(checkpoint)
    try:
        written = json.loads(file.read_text())
        files = sorted(written["files"].items())
        if written["algorithm"] != _ALGORITHM:
            raise ValueError(f"the algorithm is {written['algorithm']}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: not readable ({_said(error)}); {then}") from None
    for name, digest in files[rank::ranks]:
        if Path(name).name != name:
            raise CheckpointError(f"{file}: it names {name!r}, which is no file of this checkpoint; {then}")
        try:
            changed = _sha256(checkpoint / name) != digest
        except OSError as error:
            raise CheckpointError(f"{checkpoint / name}: not readable ({_said(error)}); {then}") from None
        if changed:
            raise CheckpointError(f"{checkpoint / name}: damaged, its contents are not those that were written; {then}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _said(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
