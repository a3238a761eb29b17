"""`PREFIX.manifest.json`: what a finished dataset holds, where it came from, and the hashes that prove it.

The manifest is written last, so a dataset with one is complete. The trainer reads it before the `.bin`.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_megatron.errors import DataError

if TYPE_CHECKING:  # it needs numpy, which `fetch-sample` does without
    from data_prep.indexed_dataset import WrittenDataset

FORMAT = 1
SUFFIX = ".manifest.json"
# The keys that say how a dataset was asked for; two datasets with the same ones are the same.
REQUEST_KEYS = ("tokenizer", "adds_bos", "adds_eos", "source", "options", "split")


def manifest_path(prefix: Path) -> Path:
    """`DIR/documents` -> `DIR/documents.manifest.json`."""
    return Path(f"{prefix}{SUFFIX}")


@dataclass
class Manifest:
    """The manifest of one dataset. Counts of documents and tokens (BOS and EOS included), sizes in bytes, hashes in hex."""

    documents: int
    tokens: int
    dtype: str
    bin_bytes: int
    idx_bytes: int
    bin_sha256: str
    idx_sha256: str
    tokenizer: dict[str, Any]
    adds_bos: bool
    adds_eos: bool
    source: dict[str, Any]
    options: dict[str, Any]
    rejected: dict[str, Any] = field(default_factory=lambda: {"count": 0, "by_reason": {}})
    dropped: dict[str, int] = field(default_factory=dict)
    split: dict[str, Any] | None = None
    cut: list[int] = field(default_factory=list)
    """Numbers of the documents whose end is missing: `blend` cuts one to meet a number of tokens exactly."""
    blend: dict[str, Any] | None = None
    """What `blend` drew from each of its inputs."""
    format: int = FORMAT

    @classmethod
    def of(cls, written: "WrittenDataset", **rest: Any) -> "Manifest":
        """The manifest of files just written; `rest` are the fields which those do not say."""
        return cls(**asdict(written), **rest)

    def to_json(self) -> str:
        """The content of the manifest's file."""
        values = {"format": self.format} | {key: value for key, value in asdict(self).items() if key != "format"}
        for key in ("split", "cut", "blend"):
            if not values[key]:
                del values[key]
        return json.dumps(values, indent=2, ensure_ascii=False) + "\n"

    def request(self) -> dict[str, Any]:
        """How this dataset was asked for; see `differences`."""
        return {key: getattr(self, key) for key in REQUEST_KEYS}


def read_manifest(prefix: Path | str) -> Manifest:
    """Read `PREFIX.manifest.json` and compare the sizes of `.bin` and `.idx` with it. Raises `DataError` on any misfit."""
    manifest = read_manifest_alone(prefix)
    for problem in wrong_sizes(prefix, manifest):
        raise DataError(f"{problem}; build the dataset again with --overwrite")
    return manifest


def read_manifest_alone(prefix: Path | str) -> Manifest:
    """Read `PREFIX.manifest.json` without a look at the files it describes. Raises `DataError` if it is missing or damaged."""
    path = manifest_path(Path(prefix))
    try:
        values = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} is missing: {prefix} is no finished dataset; build it with `python -m data_prep tokenize`") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); build the dataset again with --overwrite") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else type(values).__name__
        raise DataError(f"{path}: format {found!r}, but format {FORMAT} is needed; build the dataset again with --overwrite")
    try:
        return Manifest(**values)
    except TypeError as error:
        raise DataError(f"{path} is damaged ({error}); build the dataset again with --overwrite") from None


def wrong_sizes(prefix: Path | str, manifest: Manifest) -> Iterator[str]:
    """A sentence for each of `.bin` and `.idx` that is missing or has not the size its manifest says."""
    for suffix, expected in ((".bin", manifest.bin_bytes), (".idx", manifest.idx_bytes)):
        file = Path(f"{prefix}{suffix}")
        size = file.stat().st_size if file.is_file() else None
        if size != expected:
            found = "is missing" if size is None else f"has {size} bytes"
            yield f"{file} {found}, but its manifest says {expected} bytes"


def sha256_file(path: Path) -> str:
    """Lower-case hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_hash(path: Path, found: str, told: str) -> None:
    """Raise `DataError` unless a file's SHA-256 is the one in its manifest."""
    if found != told:
        raise DataError(f"{path} is damaged: its SHA-256 is not the one in its manifest; tokenize again with --overwrite")


def differences(old: dict[str, Any], new: dict[str, Any], at: str = "") -> list[str]:
    """Where two requests differ, as `key.path old -> new`. Folders of inputs do not count, names and contents do."""
    found = []
    for key in sorted(set(old) | set(new)):
        before, after, here = old.get(key), new.get(key), f"{at}{key}"
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{here}.")
        elif key == "inputs" and isinstance(before, list) and isinstance(after, list):
            if _contents(before) != _contents(after):
                found.append(f"{here} ({len(before)} files -> {len(after)} files, or other contents)")
        elif key != "path" and before != after:
            found.append(f"{here} {before!r} -> {after!r}")
    return found


def _contents(inputs: list[dict[str, Any]]) -> list[tuple]:
    return [(Path(entry["path"]).name, entry["bytes"], entry["sha256"], entry.get("idx_sha256")) for entry in inputs]


def describe_input(prefix: Path, manifest: Manifest) -> dict[str, Any]:
    """A dataset as an input of another: an entry of the manifest's `source.inputs`."""
    return {
        "path": str(prefix),
        "bytes": manifest.bin_bytes,
        "sha256": manifest.bin_sha256,
        "idx_sha256": manifest.idx_sha256,
        "documents": manifest.documents,
        "tokens": manifest.tokens,
    }
