"""`split`: a tokenised dataset into train and valid, by whole documents."""

from pathlib import Path

import numpy as np

from data_prep.indexed_dataset import IndexedDataset, IndexedDatasetWriter, WrittenDataset
from data_prep.manifest import SUFFIX, Manifest, read_manifest, sha256_file
from data_prep.progress import Progress
from data_prep.publish import Staging
from data_prep.tokenize_documents import finished_dataset
from hybrid_megatron.errors import DataError

PARTS = ("train", "valid")


def split(prefix: Path, output: Path, valid_fraction: float, seed: int = 0, overwrite: bool = False) -> tuple[dict[str, Manifest], bool]:
    """Build `output/train.*` and `output/valid.*`; returns both manifests and whether they were built now.

    Documents are drawn in an order fixed by `seed` until they hold `valid_fraction` of the tokens; both parts keep the order of the
    dataset. Raises `DataError` if a part would be empty, the dataset is damaged, or another dataset is in the way.
    """
    origin = read_manifest(prefix)
    requests = {}
    for part in PARTS:
        source = {"path": str(prefix), "bin_sha256": origin.bin_sha256}
        requests[part] = {**origin.request(), "split": {"part": part, "from": source, "seed": seed, "valid_fraction": valid_fraction}}
    with Staging(output, "split") as staging:
        finished = {part: finished_dataset(output / part, requests[part], overwrite, staging.was_interrupted) for part in PARTS}
        if all(finished.values()):
            return {part: manifest for part, manifest in finished.items() if manifest is not None}, False
        dataset = IndexedDataset(prefix)
        if sha256_file(dataset.bin_path) != origin.bin_sha256:
            raise DataError(f"{dataset.bin_path} is damaged: its SHA-256 is not the one in its manifest; tokenize again with --overwrite")
        valid = choose_documents(np.asarray(dataset.lengths), valid_fraction, seed)
        if valid.all() or not valid.any():
            raise DataError(
                f"--valid-fraction {valid_fraction:g} of {prefix} leaves no document to {'train' if valid.all() else 'valid'}: it has "
                f"{len(dataset)} documents of up to {max(dataset.lengths, default=0)} tokens; choose another fraction or shorter documents"
            )
        progress = Progress("split", origin.bin_bytes)
        manifests = {}
        for part, chosen in (("train", ~valid), ("valid", valid)):
            written = _copy(dataset, chosen, staging, part, progress)
            manifests[part] = Manifest.of(written, **requests[part], rejected=origin.rejected, dropped=origin.dropped)
            staging.write_text(f"{part}{SUFFIX}", manifests[part].to_json())
        progress.close()
        staging.publish(
            [f"{part}{suffix}" for part in PARTS for suffix in (".bin", ".idx")],
            last=[f"{part}{SUFFIX}" for part in PARTS],
        )
    return manifests, True


def choose_documents(lengths: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """bool [documents]: the first documents, in an order shuffled by `seed`, that together reach `fraction` of the tokens.

    The order comes from a hash of our own, since numpy does not promise the same shuffle in every version.
    """
    keys = _splitmix64(np.arange(len(lengths), dtype=np.uint64), seed)
    order = np.argsort(keys, kind="stable")
    reached = np.cumsum(lengths[order], dtype=np.int64)
    count = int(np.searchsorted(reached, fraction * lengths.sum(dtype=np.int64))) + 1
    chosen = np.zeros(len(lengths), bool)
    chosen[order[:count]] = True
    return chosen


def _splitmix64(values: np.ndarray, seed: int) -> np.ndarray:
    """SplitMix64 (Steele, Lea, Flood 2014): the `values`-th outputs of a stream that begins at a hash of `seed`."""

    def mixed(state: np.ndarray) -> np.ndarray:
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))

    step = np.uint64(0x9E3779B97F4A7C15)
    start = mixed(np.array([seed % 2**64], np.uint64) + step)
    return mixed(start + (values + np.uint64(1)) * step)


def _copy(dataset: IndexedDataset, chosen: np.ndarray, staging: Staging, part: str, progress: Progress) -> WrittenDataset:
    writer = IndexedDatasetWriter(staging.path(f"{part}.bin"), staging.path(f"{part}.idx"), dataset.dtype)
    try:
        for tokens, lengths in dataset.runs(chosen):
            writer.add_many(tokens, lengths)
            progress.update(writer.tokens * dataset.dtype.itemsize, writer.documents, writer.tokens)
        return writer.finish()
    finally:
        writer.close()
