"""`split`: a tokenised dataset into train and valid, by whole documents."""

import hashlib
from pathlib import Path

import numpy as np

from data_prep.draw import document_keys, largest_key
from data_prep.indexed_dataset import IndexedDataset, IndexedDatasetWriter, WrittenDataset
from data_prep.manifest import SUFFIX, Manifest, check_hash, read_manifest
from data_prep.progress import Progress
from data_prep.publish import Staging
from data_prep.tokenize_documents import finished_dataset
from hybrid_megatron.errors import DataError

PARTS = ("train", "valid")


def split(prefix: Path, output: Path, valid_fraction: float, seed: int = 0, overwrite: bool = False) -> tuple[dict[str, Manifest], bool]:
    """Build `output/train.*` and `output/valid.*`; returns both manifests and whether they were built now.

    Documents are drawn in an order fixed by `seed` until they hold `valid_fraction` of the tokens; both parts keep the order of the
    dataset. Memory does not grow with it. Raises `DataError` if a part would be empty, the dataset is damaged, or another dataset is in
    the way.
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
        limit = largest_key(dataset.length_pieces, valid_fraction * origin.tokens, seed)
        written, cut = _Copy(dataset, origin, limit, seed, staging).run()
        for part in PARTS:
            if written[part].documents == 0:
                raise DataError(
                    f"--valid-fraction {valid_fraction:g} of {prefix} leaves no document to {part}: it has {len(dataset)} documents of up "
                    f"to {dataset.lengths.max(initial=0)} tokens; choose another fraction or shorter documents"
                )
        manifests = {
            part: Manifest.of(written[part], **requests[part], rejected=origin.rejected, dropped=origin.dropped, cut=cut[part])
            for part in PARTS
        }
        for part, manifest in manifests.items():
            staging.write_text(f"{part}{SUFFIX}", manifest.to_json())
        staging.publish(
            [f"{part}{suffix}" for part in PARTS for suffix in (".bin", ".idx")],
            last=[f"{part}{SUFFIX}" for part in PARTS],
        )
    return manifests, True


class _Copy:
    """One pass over the dataset, which writes both parts and hashes what it reads. A document with a key up to `limit` is for valid."""

    def __init__(self, dataset: IndexedDataset, origin: Manifest, limit: int, seed: int, staging: Staging):
        self.dataset, self.origin, self.limit, self.seed = dataset, origin, np.uint64(limit), seed
        self.writers = {
            part: IndexedDatasetWriter(staging.path(f"{part}.bin"), staging.path(f"{part}.idx"), dataset.dtype) for part in PARTS
        }
        self.cut: dict[str, list[int]] = {part: [] for part in PARTS}

    def run(self) -> tuple[dict[str, WrittenDataset], dict[str, list[int]]]:
        """What was written, and the numbers of each part's documents that had been cut."""
        progress = Progress("split", self.origin.bin_bytes)
        sha256 = hashlib.sha256()
        first = done = 0
        try:
            for tokens, lengths in self.dataset.pieces():
                sha256.update(tokens)
                self._add(first, tokens, lengths)
                first, done = first + len(lengths), done + tokens.nbytes
                progress.update(done, first, done // tokens.itemsize)
            check_hash(self.dataset.bin_path, sha256.hexdigest(), self.origin.bin_sha256)
            return {part: writer.finish() for part, writer in self.writers.items()}, self.cut
        finally:
            progress.close()
            for writer in self.writers.values():
                writer.close()

    def _add(self, first: int, tokens: np.ndarray, lengths: np.ndarray) -> None:
        numbers = np.arange(first, first + len(lengths))
        valid = document_keys(numbers, self.seed) <= self.limit
        for part, chosen in (("train", ~valid), ("valid", valid)):
            writer = self.writers[part]
            self.cut[part] += (writer.documents + np.flatnonzero(np.isin(numbers[chosen], self.origin.cut))).tolist()
            writer.add_many(tokens[np.repeat(chosen, lengths)], lengths[chosen])
