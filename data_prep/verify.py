"""`verify`: does a dataset hold what its manifest says, and would a trainer read it rightly."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_prep.indexed_dataset import IndexedDataset
from data_prep.manifest import Manifest, manifest_path, read_manifest_alone, sha256_file, wrong_sizes
from data_prep.progress import Progress
from data_prep.tokenizers import Tokenizer
from hybrid_megatron.errors import DataError

_TOKENIZER_KEYS = ("name", "fingerprint", "vocab_size", "bos", "eos")


def verify(prefix: Path, tokenizer: Tokenizer | None = None) -> list[str]:
    """Every problem of a dataset, a sentence each; none if it is sound. Reads all of it, a piece at a time.

    Looked at: sizes, lengths, offsets and borders of documents, both hashes, the manifest's counts, ids within the vocabulary, BOS and
    EOS where the manifest puts them and nowhere else, and, with `tokenizer`, that it is the one that made the dataset.
    """
    problems: list[str] = []
    manifest = dataset = None
    try:
        manifest = read_manifest_alone(prefix)
    except DataError as error:
        problems.append(str(error))
    try:
        dataset = IndexedDataset(prefix, check=False)
    except DataError as error:
        problems.append(str(error))
    contradictions = list(dataset.problems()) if dataset is not None else []
    problems += contradictions
    if manifest is None:
        return problems
    problems += wrong_sizes(prefix, manifest)
    made_with = manifest.tokenizer if isinstance(manifest.tokenizer, dict) else {}
    lacks = [key for key in _TOKENIZER_KEYS if key not in made_with]
    if lacks:
        return [*problems, f"{manifest_path(prefix)} says nothing of its tokenizer's {', '.join(lacks)}"]
    if tokenizer is not None:
        problems += _unlike_tokenizer(prefix, manifest, tokenizer)
    if dataset is not None and not contradictions:
        check = _TokenCheck(dataset, manifest)
        check.run()
        problems += [*_other_counts(prefix, dataset, manifest), *check.problems(), *_other_hashes(prefix, manifest, check.sha256)]
    else:
        problems += _other_hashes(prefix, manifest, None)
    return problems


def _unlike_tokenizer(prefix: Path, manifest: Manifest, tokenizer: Tokenizer) -> Iterator[str]:
    for key in ("fingerprint", "vocab_size", "bos", "eos"):
        told, found = manifest.tokenizer[key], getattr(tokenizer, key)
        if told != found:
            name = manifest.tokenizer["name"]
            yield f"{manifest_path(prefix)}: its tokenizer {name} has {key} {told}, but --tokenizer {tokenizer.name} has {found}"


def _other_counts(prefix: Path, dataset: IndexedDataset, manifest: Manifest) -> Iterator[str]:
    found = {"documents": len(dataset), "tokens": len(dataset.tokens), "dtype": dataset.dtype.name}
    for key, value in found.items():
        if value != getattr(manifest, key):
            yield f"{manifest_path(prefix)}: {key} is {getattr(manifest, key)}, but the dataset has {value}"


def _other_hashes(prefix: Path, manifest: Manifest, bin_sha256: str | None) -> Iterator[str]:
    """`bin_sha256` is the `.bin`'s hash if it is known already."""
    for suffix, told, found in ((".bin", manifest.bin_sha256, bin_sha256), (".idx", manifest.idx_sha256, None)):
        path = Path(f"{prefix}{suffix}")
        if path.is_file() and (found or sha256_file(path)) != told:
            yield f"{path}: its SHA-256 is not the one in its manifest"


class _TokenCheck:
    """One pass over the tokens of a dataset whose index is sound."""

    def __init__(self, dataset: IndexedDataset, manifest: Manifest):
        self.dataset, self.manifest = dataset, manifest
        self.counts: Counter[str] = Counter()
        self.first: dict[str, int] = {}
        self.sha256 = ""

    def run(self) -> None:
        sha256 = hashlib.sha256()
        progress = Progress("verify", self.dataset.bin_bytes)
        document = done = 0
        for tokens, lengths in self.dataset.pieces():
            sha256.update(tokens)
            self._check(document, tokens, lengths)
            document, done = document + len(lengths), done + tokens.nbytes
            progress.update(done, document)
        progress.close()
        self.sha256 = sha256.hexdigest()

    def problems(self) -> Iterator[str]:
        for what, count in self.counts.items():
            yield f"{self.dataset.bin_path}: {count:,} {what}, the first in document {self.first[what]}"

    def _check(self, document: int, tokens: np.ndarray, lengths: np.ndarray) -> None:
        made_with, numbers = self.manifest.tokenizer, document + np.arange(len(lengths))
        ends = np.cumsum(lengths, dtype=np.int64)
        first, last = ends - lengths, ends - 1
        owner = np.repeat(numbers, lengths)
        vocabulary = made_with["vocab_size"]
        self._note(f"ids are outside the vocabulary of {vocabulary:,} words", owner[(tokens < 0) | (tokens >= vocabulary)])
        expected: dict[int, np.ndarray] = {}  # id of a special token -> where it may stand
        roles = (
            ("BOS", "begin", made_with["bos"], self.manifest.adds_bos, first),
            ("EOS", "end", made_with["eos"], self.manifest.adds_eos, last),
        )
        for name, verb, index, added, places in roles:
            if index is None:
                continue
            allowed = expected.setdefault(index, np.zeros(len(tokens), bool))
            if added:
                allowed[places] = True
                whole = ~np.isin(numbers, self.manifest.cut) if name == "EOS" else True
                self._note(f"documents do not {verb} with {name} ({index})", numbers[(tokens[places] != index) & whole])
        for index, allowed in expected.items():
            name = " or ".join(name for name, _, held, _, _ in roles if held == index)
            self._note(f"tokens are {name} ({index}) where the manifest puts none", owner[(tokens == index) & ~allowed])

    def _note(self, what: str, documents: np.ndarray) -> None:
        if len(documents):
            self.counts[what] += len(documents)
            self.first.setdefault(what, int(documents[0]))
