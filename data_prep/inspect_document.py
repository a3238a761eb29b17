"""`inspect`: one document of a dataset, as ids and as text."""

from dataclasses import dataclass
from pathlib import Path

from data_prep.indexed_dataset import IndexedDataset
from data_prep.manifest import read_manifest
from data_prep.tokenizers import Tokenizer, load
from hybrid_megatron.errors import DataError


@dataclass(frozen=True)
class Document:
    """`number` counts from 0; `text` is None where no tokenizer is at hand."""

    number: int
    ids: list[int]
    text: str | None


def inspect_document(prefix: Path, number: int, tokenizer: str | None = None) -> Document:
    """Document `number` of a dataset; -1 is the last one.

    Without `tokenizer`, its own is looked for by name: beside the dataset, then `llama3`. Raises `DataError` if there is no such document
    or the tokenizer is not the one that made the dataset.
    """
    manifest, dataset = read_manifest(prefix), IndexedDataset(prefix)
    if not -len(dataset) <= number < len(dataset):
        raise DataError(
            f"{prefix} has {len(dataset):,} documents, 0 to {len(dataset) - 1}, or -1 to -{len(dataset)} from the end: not {number}"
        )
    number %= len(dataset)
    ids = dataset[number].tolist()
    found = load(tokenizer) if tokenizer is not None else _own_tokenizer(prefix, manifest.tokenizer)
    if found is None:
        return Document(number, ids, None)
    if found.fingerprint != manifest.tokenizer["fingerprint"]:
        raise DataError(
            f"{prefix} was made with the tokenizer {manifest.tokenizer['name']} ({manifest.tokenizer['fingerprint'][:19]}...), not with "
            f"{tokenizer} ({found.fingerprint[:19]}...), whose text would be another"
        )
    # An id may be damaged: ids outside the vocabulary have no text.
    return Document(number, ids, found.decode([index for index in ids if index < found.vocab_size]))


def _own_tokenizer(prefix: Path, made_with: dict) -> Tokenizer | None:
    beside = prefix.parent / made_with["name"]
    for name in [beside] if beside.exists() else ["llama3"] if made_with["name"] == "llama3" else []:
        found = load(name)
        if found.fingerprint == made_with["fingerprint"]:
            return found
    return None
