"""Small datasets for the tests of data_prep's tools, and its command line."""

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.cli import main
from data_prep.indexed_dataset import IndexedDataset, IndexedDatasetWriter, token_dtype
from data_prep.manifest import Manifest, manifest_path

TOKENIZER = {"name": "t.model", "kind": "sentencepiece", "fingerprint": "sha256:0", "vocab_size": 400, "bos": 1, "eos": 2}


class Said(NamedTuple):
    out: str
    err: str


def write_dataset(prefix: Path, documents: Sequence[Sequence[int]], **told) -> Path:
    """A dataset of these documents, as they are; `told` are fields of its manifest. Returns `prefix`."""
    tokens = np.concatenate([np.asarray(document) for document in documents])
    return write_arrays(prefix, tokens, np.array([len(document) for document in documents], np.int32), **told)


def write_arrays(prefix: Path, tokens: np.ndarray, lengths: np.ndarray, **told) -> Path:
    """The same from arrays [tokens] and [documents]."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    told = {"tokenizer": TOKENIZER, "adds_bos": True, "adds_eos": True, "source": {"kind": "made", "inputs": []}, "options": {}} | told
    dtype = token_dtype(told["tokenizer"]["vocab_size"])
    writer = IndexedDatasetWriter(Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), dtype)
    writer.add_many(tokens.astype(dtype), lengths)
    manifest_path(prefix).write_text(Manifest.of(writer.finish(), **told).to_json())
    return prefix


def documents_of(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset[number].tolist() for number in range(len(dataset))]


def run(*words) -> tuple[int, Said]:
    """`python -m data_prep WORDS`: its exit code and what it said."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(word) for word in words])
        except SystemExit as leaving:
            code = int(leaving.code or 0)
    return code, Said(out.getvalue(), err.getvalue())
