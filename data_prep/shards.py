"""Which shards of a corpus cover a budget of tokens: a seeded order of all of them, cut where the estimate is reached.

The order sorts by SHA-256 of seed and path, so it needs no random generator whose versions differ, and a larger budget or margin only
extends the list. A shard's tokens are estimated from its size (`data_prep.corpora` says how); the margin is what the estimate may be
wrong by, and what filtering and a validation set take.
"""

import fnmatch
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from data_prep.hub import RemoteFile
from hybrid_megatron.errors import DataError
from hybrid_megatron.quantities import human_count


@dataclass(frozen=True)
class Shard:
    """One file of a corpus and its estimated tokens."""

    file: RemoteFile
    tokens: int


def shards_of(files: Sequence[RemoteFile], patterns: Sequence[str], tokens_per_byte: Mapping[str, float]) -> list[Shard]:
    """The files that match a pattern. Raises `DataError` where none does or a ratio is missing for one."""
    matching = [file for file in files if any(fnmatch.fnmatchcase(file.path, pattern) for pattern in patterns)]
    if not matching:
        raise DataError(f"none of the repository's {len(files):,} files matches {' or '.join(patterns)}; name its shards with --pattern")
    return [Shard(file, int(file.size * _ratio(file.path, tokens_per_byte))) for file in matching]


def _ratio(path: str, tokens_per_byte: Mapping[str, float]) -> float:
    for suffix, ratio in tokens_per_byte.items():
        if path.endswith(suffix):
            return ratio
    raise DataError(f"{path}: how many tokens a byte of such a file holds is not known; say so with --tokens-per-byte")


def choose(shards: Sequence[Shard], seed: int, tokens: int, margin: float) -> list[Shard]:
    """The first shards in the seed's order that hold `tokens * (1 + margin)` by estimate; all of them if only the margin is missing.

    Raises `DataError` if all shards together fall short of `tokens`.
    """
    total = sum(shard.tokens for shard in shards)
    if total < tokens:
        has = f"holds about {human_count(total)} tokens in {len(shards):,} shards"
        raise DataError(f"--tokens {human_count(tokens)} is more than the corpus has: it {has}; ask for fewer")
    chosen, covered = [], 0
    for shard in sorted(shards, key=lambda shard: _place(seed, shard.file.path)):
        if covered >= tokens * (1 + margin):
            break
        chosen.append(shard)
        covered += shard.tokens
    return chosen


def _place(seed: int, path: str) -> bytes:
    return hashlib.sha256(f"{seed}\n{path}".encode()).digest()
