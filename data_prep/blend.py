"""`blend`: a dataset of a given number of tokens, drawn from several by weight."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.blend_copy import copy_documents
from data_prep.draw import derived_seed, document_keys, largest_key
from data_prep.indexed_dataset import IndexedDataset
from data_prep.manifest import SUFFIX, Manifest, check_hash, describe_input, read_manifest, sha256_file
from data_prep.merge import check_output_apart, check_same_making, making_of
from data_prep.publish import Staging
from data_prep.tokenize_documents import finished_dataset
from hybrid_megatron.errors import DataError


def blend_datasets(
    inputs: Sequence[tuple[float, Path]], tokens: int, output: Path, seed: int = 0, repeat: bool = False, overwrite: bool = False
) -> tuple[Manifest, bool]:
    """Build `output.{bin,idx,manifest.json}` with exactly `tokens` tokens from `inputs`, pairs of a weight and a dataset.

    Returns the manifest and whether it was built now. Documents are drawn one by one: of all inputs the one that is furthest behind its
    share of the tokens gives the next document of its own order, which `seed` fixes; so each share is met to within one document. None is
    drawn twice, unless `repeat` lets an input begin again, in another order, once it is used up. The last document is cut to meet
    `tokens`; the manifest's `cut` has its number. Memory: about 60 bytes a document drawn. The `.bin` of an input is not hashed, since
    only a part of it is read; `verify` does that.

    Raises `DataError` if an input holds less than its share, the inputs do not go together, or another dataset is in the way.
    """
    prefixes = [prefix for _, prefix in inputs]
    check_output_apart(prefixes, output)
    manifests = [read_manifest(prefix) for prefix in prefixes]
    for prefix, manifest in zip(prefixes, manifests, strict=True):
        check_same_making(prefixes[0], making_of(manifests[0]), prefix, making_of(manifest))
    weights = _checked_weights(inputs, manifests)
    quotas = [math.ceil(tokens * weight) for weight in weights]
    if not repeat:
        _check_supply(prefixes, manifests, weights, quotas, tokens)
    request = {
        **{key: value for key, value in making_of(manifests[0]).items() if key != "dtype"},
        "source": {"kind": "blend", "inputs": [describe_input(prefix, each) for prefix, each in zip(prefixes, manifests, strict=True)]},
        "options": {"weights": [float(weight) for weight in weights], "tokens": tokens, "seed": seed, "repeat": repeat},
    }
    with Staging(output.parent, output.name) as staging:
        finished = finished_dataset(output, request, overwrite, staging.was_interrupted)
        if finished is not None:
            return finished, False
        datasets = [IndexedDataset(prefix) for prefix in prefixes]
        for dataset, manifest in zip(datasets, manifests, strict=True):
            check_hash(dataset.idx_path, sha256_file(dataset.idx_path), manifest.idx_sha256)
        orders = [_order(dataset, quota, (seed, number)) for number, (dataset, quota) in enumerate(zip(datasets, quotas, strict=True))]
        drawn = draw(orders, weights, tokens)
        paths = [staging.path(f"{output.name}{suffix}") for suffix in (".bin", ".idx")]
        written = copy_documents(datasets, drawn.sources, drawn.documents, drawn.lengths, *paths)
        manifest = Manifest.of(written, **request, **_told(drawn, datasets, manifests))
        staging.write_text(f"{output.name}{SUFFIX}", manifest.to_json())
        staging.publish([path.name for path in paths], last=[f"{output.name}{SUFFIX}"])
    return manifest, True


@dataclass(frozen=True)
class Drawn:
    """Documents in the order in which they were drawn, [n] each; `lengths` in tokens, the last one cut."""

    sources: np.ndarray
    documents: np.ndarray
    lengths: np.ndarray


def draw(orders: Sequence[tuple[np.ndarray, np.ndarray]], weights: Sequence[Fraction], tokens: int) -> Drawn:
    """Interleave each source's (documents, lengths) until there are `tokens` tokens; every source must hold its share of them.

    Drawing from the source for which tokens so far / weight is least is sorting all documents by what that was when each was drawn.
    """
    turns = [(np.cumsum(lengths, dtype=np.int64) - lengths) / float(weight) for (_, lengths), weight in zip(orders, weights, strict=True)]
    order = np.argsort(np.concatenate(turns), kind="stable")
    sources = np.repeat(np.arange(len(orders), dtype=np.int32), [len(documents) for documents, _ in orders])[order]
    documents, lengths = (np.concatenate(parts)[order] for parts in zip(*orders, strict=True))
    reached = np.cumsum(lengths, dtype=np.int64)
    count = int(np.searchsorted(reached, tokens)) + 1
    lengths = lengths[:count].copy()
    lengths[-1] -= reached[count - 1] - tokens
    return Drawn(sources[:count], documents[:count], lengths)


def _order(dataset: IndexedDataset, tokens: int, seeds: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The first documents of a dataset in its seeded order that hold `tokens`, and their lengths; further rounds if it has not so many."""
    documents, lengths = [], []
    held = len(dataset.tokens)
    for turn in range(-(-tokens // held)):
        numbers, found = _round(dataset, min(held, tokens - turn * held), derived_seed(seeds[0], seeds[1], turn))
        documents.append(numbers)
        lengths.append(found)
    return np.concatenate(documents), np.concatenate(lengths)


def _round(dataset: IndexedDataset, tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    limit = np.uint64(largest_key(dataset.length_pieces, tokens, seed))
    chosen, first = [], 0
    for lengths in dataset.length_pieces():
        numbers = np.arange(first, first + len(lengths))
        keys = document_keys(numbers, seed)
        chosen.append((keys[keys <= limit], numbers[keys <= limit], lengths[keys <= limit]))
        first += len(lengths)
    keys, numbers, lengths = (np.concatenate(parts) for parts in zip(*chosen, strict=True))
    order = np.argsort(keys)
    return numbers[order], lengths[order]


def _checked_weights(inputs: Sequence[tuple[float, Path]], manifests: Sequence[Manifest]) -> list[Fraction]:
    """The weights as exact shares of one."""
    seen: dict[tuple[str, str], Path] = {}
    for (weight, prefix), manifest in zip(inputs, manifests, strict=True):
        if not 0 < weight < math.inf:
            raise DataError(f"--input {weight:g} {prefix}: a weight is a number above 0")
        if manifest.tokens < 1:
            raise DataError(f"--input {weight:g} {prefix}: the dataset holds no tokens; leave it out")
        content = manifest.bin_sha256, manifest.idx_sha256
        if content in seen:
            raise DataError(f"--input {seen[content]} and {prefix} are the same data; give it once, with one weight")
        seen[content] = prefix
    total = sum(Fraction(weight) for weight, _ in inputs)
    return [Fraction(weight) / total for weight, _ in inputs]


def _check_supply(
    prefixes: Sequence[Path], manifests: Sequence[Manifest], weights: Sequence[Fraction], quotas: Sequence[int], tokens: int
) -> None:
    short = [
        f"{prefix} holds {manifest.tokens:,} and its share is {quota:,}"
        for prefix, manifest, quota in zip(prefixes, manifests, quotas, strict=True)
        if manifest.tokens < quota
    ]
    if short:
        most = min(math.floor(manifest.tokens / weight) for manifest, weight in zip(manifests, weights, strict=True))
        raise DataError(
            f"--tokens {tokens:,} is more than the inputs allow at these weights: {'; '.join(short)}; ask for at most {most:,}, change the "
            "weights, or add --repeat to draw documents more than once"
        )


def _told(drawn: Drawn, datasets: Sequence[IndexedDataset], manifests: Sequence[Manifest]) -> dict[str, Any]:
    """The manifest's `cut` and `blend`: which documents lack their end, and what came from where."""
    taken, cut = [], []
    for number, manifest in enumerate(manifests):
        mine = drawn.sources == number
        documents, tokens = int(mine.sum()), int(drawn.lengths[mine].sum(dtype=np.int64))
        taken.append({"documents": documents, "tokens": tokens, "rounds": -(-documents // manifest.documents)})
        cut += np.flatnonzero(mine & np.isin(drawn.documents, manifest.cut)).tolist()
    last = len(drawn.lengths) - 1
    whole = int(datasets[drawn.sources[last]].lengths[drawn.documents[last]])
    told: dict[str, Any] = {"taken": taken}
    if drawn.lengths[last] < whole:
        cut.append(last)
        told["cut"] = {"document": last, "tokens": int(drawn.lengths[last]), "of": whole}
    return {"cut": sorted(set(cut)), "blend": told}
