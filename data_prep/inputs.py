"""Input files: found behind files, folders, globs, lists and standard input, in a fixed order, and grouped into shards."""

import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.compression import COMPRESSED_SUFFIXES, STANDARD_INPUT
from hybrid_megatron.errors import DataError

SUFFIXES = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "text": (".txt", ".text", ".md"),
    "parquet": (".parquet",),
    "webdataset": (".tar", ".tgz"),
}
# What `tokenize` itself writes: never an input, even where the output folder is also the input folder.
REJECT_FILES = ("rejects.jsonl", "rejects.failed.jsonl")
PARTS = "parts"
# Books come a file each: so many together are one shard.
SHARD_BYTES, SHARD_FILES = 64_000_000, 1_024


@dataclass(frozen=True)
class Shard:
    """Input files that are tokenized together, into the part `name` of the dataset."""

    name: str
    files: tuple[Path, ...]

    def __str__(self) -> str:
        return str(self.files[0]) if len(self.files) == 1 else f"{self.files[0]} to {self.files[-1].name}"


def find_files(layout: str, inputs: Sequence[str], output: Path | None = None) -> list[Path]:
    """Files in the order of `inputs`, sorted within a folder or glob, each once. `output`'s own files are left out of folders.

    An input is a file, a folder, a glob, `@LIST` (a file with an input a line) or `-` (standard input, alone). `layout` is a key of
    SUFFIXES. Raises `DataError` where nothing is found.
    """
    inputs = list(_expanded(inputs))
    if str(STANDARD_INPUT) in inputs:
        if len(inputs) > 1:
            raise DataError(f"--input - stands for standard input and comes alone, not with {len(inputs) - 1} others; leave them out")
        if layout == "parquet":
            raise DataError("--input - cannot be parquet, which is not read from front to back; write it to a file first")
        return [STANDARD_INPUT]
    suffixes = tuple(suffix + compressed for suffix in SUFFIXES[layout] for compressed in COMPRESSED_SUFFIXES)
    own = {(output / name).resolve() for name in (*REJECT_FILES, PARTS)} if output else set()
    found: dict[Path, Path] = {}
    for item in inputs:
        path = Path(item)
        if path.is_dir():
            candidates = (file for file in path.rglob("*") if file.name.endswith(suffixes) and file.is_file())
            visible = (file for file in candidates if not any(part.startswith(".") for part in file.relative_to(path).parts))
            files = sorted(file for file in visible if not _is_own(file.resolve(), own))
            rule = f"holds no file that ends in {', '.join(suffixes)}"
        elif path.exists():
            if not path.is_file():
                raise DataError(f"--input {item} is neither a file nor a folder (a pipe cannot be read twice); write it to a file first")
            files, rule = [path], ""
        else:
            files = sorted(Path(name) for name in glob.glob(item, recursive=True) if Path(name).is_file())
            rule = "matches no file"
        if not path.is_dir() and (taken := [file for file in files if _is_output(file.resolve(), own)]):
            raise DataError(f"--input {taken[0]} lies where --output {output} is written; move it, or choose another --output")
        if not files:
            raise DataError(f"--input {item} {rule}; check the path (quote a glob, so that the shell leaves it alone)")
        for file in files:
            found.setdefault(file.resolve(), file)
    return list(found.values())


def _is_output(file: Path, own: set[Path]) -> bool:
    return file in own or any(folder in own for folder in file.parents)


def _is_own(file: Path, own: set[Path]) -> bool:
    return _is_output(file, own) or file.name.endswith(".manifest.json")


def _expanded(inputs: Sequence[str]) -> Iterator[str]:
    for item in inputs:
        if not item.startswith("@"):
            yield item
            continue
        try:
            lines = Path(item[1:]).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"--input {item}: the list of inputs cannot be read ({error}); check {item[1:]}") from None
        names = [line.strip() for line in lines if line.strip()]
        if not names:
            raise DataError(f"--input {item}: the list names no input; write one path a line into {item[1:]}")
        yield from names


def shards_of(files: Sequence[Path], sizes: Sequence[int], grouped: bool) -> list[Shard]:
    """One shard a file, or, `grouped`, a shard for every 64 MB or 1,024 files. Names begin with a number, so they sort in reading order."""
    groups: list[list[Path]] = []
    room = 0
    for file, size in zip(files, sizes, strict=True):
        if not grouped or not groups or room < size or len(groups[-1]) == SHARD_FILES:
            groups.append([])
            room = SHARD_BYTES
        groups[-1].append(file)
        room -= size
    width = max(5, len(str(len(groups))))
    return [Shard(f"{number:0{width}}-{_stem(group[0])}", tuple(group)) for number, group in enumerate(groups)]


def _stem(file: Path) -> str:
    if file == STANDARD_INPUT:
        return "stdin"
    name = file.name
    for suffix in (*COMPRESSED_SUFFIXES[1:], *(suffix for kinds in SUFFIXES.values() for suffix in kinds)):
        name = name.removesuffix(suffix)
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:80].lstrip(".") or "file"
