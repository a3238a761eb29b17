"""Drawing documents in an order fixed by a seed, without holding all of them.

Each document has a 64-bit key, a hash of its number and the seed; keys of one seed are all different. Documents are drawn in the order of
their keys, so a set of them is described by one number: the largest key drawn. The hash is our own, since numpy does not promise the same
shuffle in every version.
"""

from collections.abc import Callable, Iterable

import numpy as np

_BUCKET_BITS = 16


def document_keys(numbers: np.ndarray, seed: int) -> np.ndarray:
    """u64 keys of documents: SplitMix64 (Steele, Lea, Flood 2014), the `numbers`-th outputs of a stream that begins at a hash of `seed`."""

    def mixed(state: np.ndarray) -> np.ndarray:
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))

    step = np.uint64(0x9E3779B97F4A7C15)
    start = mixed(np.array([seed % 2**64], np.uint64) + step)
    return mixed(start + (numbers.astype(np.uint64) + np.uint64(1)) * step)


def derived_seed(seed: int, *path: int) -> int:
    """A seed for each sequence of whole numbers, unlike those of other sequences."""
    for number in path:
        seed = int(document_keys(np.array([number]), seed)[0])
    return seed


def largest_key(lengths: Callable[[], Iterable[np.ndarray]], tokens: float, seed: int) -> int:
    """The largest key of the fewest documents, in the order of their keys, that hold `tokens` tokens together; all there are, if fewer.

    `lengths()` yields the lengths of all documents in pieces, the same ones twice. Memory: one piece, and one document in 65,536.
    """
    shift = np.uint64(64 - _BUCKET_BITS)
    held = np.zeros(1 << _BUCKET_BITS, np.int64)  # tokens of the documents whose keys begin with these bits
    for keys, piece in _keyed(lengths(), seed):
        # float64 sums of bincount are exact: a piece has less than 2^53 tokens
        held += np.bincount((keys >> shift).astype(np.int64), weights=piece, minlength=len(held)).astype(np.int64)
    reached = np.cumsum(held)
    bucket = int(np.searchsorted(reached, tokens))
    if bucket == len(held):
        return 2**64 - 1
    pieces = [(keys[inside], piece[inside]) for keys, piece in _keyed(lengths(), seed) for inside in [keys >> shift == bucket]]
    keys, inside = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    order = np.argsort(keys)
    before = int(reached[bucket] - held[bucket])
    return int(keys[order][np.searchsorted(before + np.cumsum(inside[order], dtype=np.int64), tokens)])


def _keyed(pieces: Iterable[np.ndarray], seed: int) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    first = 0
    for piece in pieces:
        yield document_keys(np.arange(first, first + len(piece)), seed), piece
        first += len(piece)
