"""`merge`: several tokenised datasets into one, documents in order."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from data_prep.manifest import SUFFIX, Manifest, check_hash, describe_input, differences, read_manifest, sha256_file
from data_prep.progress import Progress
from data_prep.publish import Staging
from data_prep.tokenize_documents import finished_dataset
from hybrid_megatron.errors import DataError


def merge_datasets(prefixes: Sequence[Path], output: Path, overwrite: bool = False) -> tuple[Manifest, bool]:
    """Build `output.{bin,idx,manifest.json}` from the documents of `prefixes`, one dataset after the other.

    Returns the manifest, which lists the parts with their hashes, and whether the merge was done now. Memory does not grow with the
    number or the size of the parts. Raises `DataError` if the parts have not the same tokenizer, type and BOS and EOS, if one is damaged,
    or if another dataset is in the way.
    """
    check_output_apart(prefixes, output)
    parts = [_Part(prefix) for prefix in prefixes]
    for part in parts[1:]:
        check_same_making(parts[0].prefix, parts[0].making, part.prefix, part.making)
    request = {key: parts[0].making[key] for key in ("tokenizer", "adds_bos", "adds_eos")}
    request |= {"source": {"kind": "merge", "inputs": [part.described for part in parts]}, "options": {}}
    with Staging(output.parent, output.name) as staging:
        finished = finished_dataset(output, request, overwrite, staging.was_interrupted)
        if finished is not None:
            return finished, False
        paths = [staging.path(f"{output.name}{suffix}") for suffix in (".bin", ".idx")]
        writer = IndexedDatasetWriter(*paths, IndexedDataset(parts[0].prefix).dtype)
        progress = Progress("merge", sum(part.described["bytes"] for part in parts))
        try:
            for part in parts:
                _append(part, writer, progress)
            written = writer.finish()
        finally:
            progress.close()
            writer.close()
        manifest = Manifest.of(written, **request, **_summed(parts))
        staging.write_text(f"{output.name}{SUFFIX}", manifest.to_json())
        staging.publish([path.name for path in paths], last=[f"{output.name}{SUFFIX}"])
    return manifest, True


def check_output_apart(inputs: Sequence[Path], output: Path) -> None:
    """Raise `DataError` if the output would overwrite an input."""
    if output.name.startswith(".") or not output.name:
        raise DataError(f"--output {output} should be a folder and a name, such as /data/all, from which /data/all.bin and .idx follow")
    if output.absolute().resolve() in [prefix.absolute().resolve() for prefix in inputs]:
        raise DataError(f"--output {output} is also an --input; choose another --output")


def making_of(manifest: Manifest) -> dict[str, Any]:
    """How a dataset's documents became tokens: what has to be the same in datasets that are put together."""
    return {key: getattr(manifest, key) for key in ("tokenizer", "adds_bos", "adds_eos", "dtype")}


def check_same_making(first: Path, made: dict[str, Any], other: Path, made_otherwise: dict[str, Any]) -> None:
    """Raise `DataError` with what differs. A tokenizer may lie in files of different names."""
    old, new = ({**making, "tokenizer": {**making["tokenizer"], "name": None}} for making in (made, made_otherwise))
    changed = differences(old, new)
    if changed:
        raise DataError(
            f"{other} differs from {first} in {'; '.join(changed)}; datasets go together only if their tokenizer, "
            "type, BOS and EOS are the same: tokenize it again or leave it out"
        )


class _Part:
    """What is kept of a part while others are read: its manifest may list thousands of input files."""

    def __init__(self, prefix: Path):
        manifest = read_manifest(prefix)
        self.prefix, self.described, self.making = prefix, describe_input(prefix, manifest), making_of(manifest)
        self.rejected, self.dropped, self.cut = manifest.rejected, manifest.dropped, manifest.cut


def _append(part: _Part, writer: IndexedDatasetWriter, progress: Progress) -> None:
    dataset = IndexedDataset(part.prefix)
    check_hash(dataset.idx_path, sha256_file(dataset.idx_path), part.described["idx_sha256"])
    sha256 = hashlib.sha256()
    for tokens, lengths in dataset.pieces():
        sha256.update(tokens)
        writer.add_many(tokens, lengths)
        progress.update(writer.tokens * tokens.itemsize, writer.documents, writer.tokens)
    check_hash(dataset.bin_path, sha256.hexdigest(), part.described["sha256"])


def _summed(parts: Sequence[_Part]) -> dict[str, Any]:
    reasons, dropped, cut, before = Counter(), Counter(), [], 0
    for part in parts:
        reasons.update(part.rejected["by_reason"])
        dropped.update(part.dropped)
        cut += [before + number for number in part.cut]
        before += part.described["documents"]
    rejected = {"count": reasons.total(), "by_reason": dict(sorted(reasons.items()))}
    return {"rejected": rejected, "dropped": dict(dropped), "cut": cut}
