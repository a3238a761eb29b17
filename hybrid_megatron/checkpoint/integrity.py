"""SHA-256 hashes of a checkpoint's files, in `integrity.json`, in megatron-core's own form; the ranks share the checking."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from hybrid_megatron.errors import CheckpointError

HASHES = "integrity.json"
_ALGORITHM = "sha256"


def hash_file(path: Path) -> str:
    """Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, _ALGORITHM).hexdigest()


def hash_text(text: str) -> str:
    """Of the file that will hold this text."""
    return hashlib.sha256(text.encode()).hexdigest()


def write_hashes(folder: Path, files: dict[str, str]) -> None:
    """Write down name -> hash. Raises OSError."""
    (folder / HASHES).write_text(json.dumps({"algorithm": _ALGORITHM, "files": dict(sorted(files.items()))}, indent=2) + "\n")


def check_hashes(checkpoint: Path, rank: int = 0, ranks: int = 1) -> None:
    """Check share `rank` of `ranks` of the files; raise CheckpointError if one is missing or changed."""
    for problem in damages(checkpoint, rank, ranks):
        raise CheckpointError(problem)


def damages(checkpoint: Path, rank: int = 0, ranks: int = 1) -> Iterator[str]:
    """A sentence, without its full stop, for each file of this share that is missing or changed."""
    file = checkpoint / HASHES
    try:
        written = json.loads(file.read_text())
        files = sorted(written["files"].items())
        if written["algorithm"] != _ALGORITHM:
            raise ValueError(f"the algorithm is {written['algorithm']}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        yield f"{file}: not readable ({_said(error)})"
        return
    for name, digest in files[rank::ranks]:
        if Path(name).name != name:
            yield f"{file}: it names {name!r}, which is no file of this checkpoint"
            continue
        try:
            changed = hash_file(checkpoint / name) != digest
        except OSError as error:
            yield f"{checkpoint / name}: not readable ({_said(error)})"
            continue
        if changed:
            yield f"{checkpoint / name}: damaged, its contents are not those that were written"


def lacks_files(checkpoint: Path) -> bool:
    """Whether a file is missing, or the list of them: what can be seen without reading any."""
    try:
        names = json.loads((checkpoint / HASHES).read_text())["files"]
        return not all((checkpoint / name).is_file() for name in names)
    except (OSError, ValueError, KeyError, TypeError):
        return True


def _said(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
