"""Files that every node must see alike: the datasets, with manifest, tokenizer and index maps, and the checkpoint to start from.

What is wrong on all nodes is a user's mistake. What some nodes see and others do not is a mistake too if it lies on a node's own disk,
since no other node would see it either; if it lies on a file system that nodes share, those that do not see it are bad.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hybrid_megatron.checkpoint.origin import check_origin, needs_origin
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.data import open_dataset
from hybrid_megatron.data.datasets import SPLITS, files_of
from hybrid_megatron.errors import NoIndexMaps, UserError
from hybrid_megatron.preflight.report import Finding, Level, named, odd_ones

_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay", "squashfs", "apfs", "hfs", "")
"""File systems of one node; whatever else a cluster mounts is shared. Empty: not known, as outside Linux."""


@dataclass(frozen=True)
class Seen:
    """What one node sees of something."""

    problem: str
    """Why it cannot be used there, in one sentence; empty if it can."""
    files: tuple[tuple[str, int], ...]
    """Its files and their bytes."""
    shared: bool
    """Whether it lies on a file system that nodes share."""


def gather_files(config: RunConfig, words: list[str]) -> dict[str, Seen]:
    """What this node sees, by setting. `words`: the recipe as typed, for the ways out."""
    found = {}
    for split in SPLITS:
        if prefix := getattr(config.data, split):
            found[f"data.{split}"] = _see(lambda split=split: files_of(open_dataset(config, split)), Path(prefix).parent, words)
    if needs_origin(config):
        found["init_from"] = _see(lambda: sorted(check_origin(config).iterdir()), Path(config.init_from), words)
    return found


def _see(files: Callable[[], list[Path]], place: Path, words: list[str]) -> Seen:
    try:
        return Seen("", tuple((str(file), file.stat().st_size) for file in files()), is_shared(place))
    except NoIndexMaps as error:
        return Seen(str(error.of_recipe(words)), (), is_shared(place))
    except UserError as error:
        return Seen(str(error), (), is_shared(place))


def existing_folder(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists: where it would be made."""
    path = Path(path).absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def is_shared(path: Path, mounts: str | None = None) -> bool:
    """Whether the nearest existing folder is on a file system that nodes share; `mounts` has the form of /proc/self/mountinfo."""
    if mounts is None:
        file = Path("/proc/self/mountinfo")
        mounts = file.read_text() if file.is_file() else ""
    place, longest, kind = os.path.realpath(existing_folder(path)), "", ""
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        mount = fields.split()[4].replace("\\040", " ")
        if (place == mount or place.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(longest):
            longest, kind = mount, rest.split()[0]
    return kind not in _LOCAL


def judge_files(setting: str, seen: dict[str, Seen]) -> list[Finding]:
    broken = [node for node, each in seen.items() if each.problem]
    whole = {node: each for node, each in seen.items() if not each.problem}
    if not whole:
        return [Finding(setting, Level.REFUSED, text) for text in dict.fromkeys(each.problem for each in seen.values())]
    if broken:
        return [_partial(setting, f"{named(whole)} can use it, {named(broken)} cannot: {seen[broken[0]].problem}", broken, whole)]
    usual, odd = odd_ones({node: each.files for node, each in seen.items()})
    if odd:
        node, files = next(iter(odd.items()))
        differing = sorted(set(usual) ^ set(files))[0][0]
        found = f"{named(odd)} and the others do not see the same: {differing} is of another size, or not everywhere"
        return [_partial(setting, found, list(odd) if 2 * len(odd) < len(seen) else [], whole)]
    return [Finding(setting, Level.FINE, f"{len(usual)} files, the same on {len(seen)} node{'s' if len(seen) > 1 else ''}")]


def _partial(setting: str, found: str, nodes: list[str], whole: dict[str, Seen]) -> Finding:
    if nodes and all(each.shared for each in whole.values()):
        return Finding(
            setting, Level.BAD_NODE, f"{found}; it lies on a file system that nodes share: look at its mount there", tuple(nodes)
        )
    return Finding(setting, Level.REFUSED, f"{found}; put it on a file system that all nodes share, under the same path")
