"""`verify` finds every kind of damage and says nothing of sound datasets; `inspect` shows a document."""

import json
from pathlib import Path

import numpy as np
import pytest

from data_prep.indexed_dataset import HEADER_BYTES
from data_prep.manifest import manifest_path
from data_prep.verify import verify
from tests.cpu.token_files import TOKENIZER, run, write_dataset

DOCUMENTS = [[1, 7, 8, 2], [1, 9, 2], [1, 10, 11, 12, 2]]
LENGTHS, OFFSETS, BORDERS = HEADER_BYTES, HEADER_BYTES + 4 * 3, HEADER_BYTES + 12 * 3


@pytest.fixture
def dataset(tmp_path) -> Path:
    return write_dataset(tmp_path / "documents", DOCUMENTS)


def put(prefix: Path, suffix: str, at: int, value: int, dtype: str) -> None:
    with open(f"{prefix}{suffix}", "r+b") as file:
        file.seek(at)
        file.write(np.array([value], dtype).tobytes())


def put_manifest(prefix: Path, **values) -> None:
    path = manifest_path(prefix)
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_sound_dataset(dataset):
    code, said = run("verify", dataset)
    assert (code, said.out, said.err) == (0, f"{dataset}: sound\n", "")
    code, said = run("verify", dataset, "--json")
    assert code == 0 and json.loads(said.out) == {"prefix": str(dataset), "sound": True, "problems": []}


HASH = "SHA-256 is not the one in its manifest"
DAMAGE = {
    "a token": (lambda p: put(p, ".bin", 2, 77, "<u2"), [f"bin: its {HASH}"]),
    "outside the vocabulary": (
        lambda p: put(p, ".bin", 2, 400, "<u2"),
        ["bin: 1 ids are outside the vocabulary of 400 words, the first in document 0", HASH],
    ),
    "no BOS": (lambda p: put(p, ".bin", 2 * 4, 5, "<u2"), ["bin: 1 documents do not begin with BOS (1), the first in document 1", HASH]),
    "no EOS": (lambda p: put(p, ".bin", 2 * 11, 5, "<u2"), ["bin: 1 documents do not end with EOS (2), the first in document 2", HASH]),
    "BOS inside": (
        lambda p: put(p, ".bin", 2 * 8, 1, "<u2"),
        ["bin: 1 tokens are BOS (1) where the manifest puts none, the first in document 2", HASH],
    ),
    "EOS inside": (
        lambda p: put(p, ".bin", 2 * 5, 2, "<u2"),
        ["bin: 1 tokens are EOS (2) where the manifest puts none, the first in document 1", HASH],
    ),
    "BOS that the manifest denies": (
        lambda p: put_manifest(p, adds_bos=False),
        ["bin: 3 tokens are BOS (1) where the manifest puts none, the first in document 0"],
    ),
    "short bin": (
        lambda p: Path(f"{p}.bin").write_bytes(Path(f"{p}.bin").read_bytes()[:-2]),
        ["bin: 22 bytes, but its index counts 12 tokens of 2 bytes", "bin has 22 bytes, but its manifest says 24 bytes", HASH],
    ),
    "long bin": (lambda p: put(p, ".bin", 24, 5, "<u2"), ["bin: 26 bytes, but its index counts 12", "bin has 26 bytes", HASH]),
    "a length": (
        lambda p: put(p, ".idx", LENGTHS + 4, 4, "<i4"),
        [
            "idx: document 2 has an offset of 14 bytes, which is not where the one before it ends",
            "bin: 24 bytes, but its index counts 13",
            HASH,
        ],
    ),
    "no length": (
        lambda p: put(p, ".idx", LENGTHS, 0, "<i4"),
        ["idx: document 0 has a length of 0 tokens", "idx: document 1 has an offset of 8", "bin: 24 bytes, but its index counts 8", HASH],
    ),
    "an offset": (lambda p: put(p, ".idx", OFFSETS, 2, "<i8"), ["idx: document 0 has an offset of 2 bytes", HASH]),
    "a border": (lambda p: put(p, ".idx", BORDERS + 8, 2, "<i8"), ["idx: document 1 has the entry 2 in the document index", HASH]),
    "the last border": (
        lambda p: put(p, ".idx", BORDERS + 24, 2, "<i8"),
        ["idx: its document index does not end with the number of documents, 3", HASH],
    ),
    "header": (lambda p: put(p, ".idx", 0, 0, "<u1"), ["idx: not the index of a Megatron dataset", f"idx: its {HASH}"]),
    "short index": (
        lambda p: Path(f"{p}.idx").write_bytes(Path(f"{p}.idx").read_bytes()[:-8]),
        ["idx: version 1, type 8, 3 sequences, 3 documents, 94 bytes", "idx has 94 bytes, but its manifest says 102 bytes", HASH],
    ),
    "no bin": (lambda p: Path(f"{p}.bin").unlink(), ["the dataset cannot be read (No such file or directory", "bin is missing"]),
    "no manifest": (lambda p: manifest_path(p).unlink(), ["manifest.json is missing"]),
    "counts": (
        lambda p: put_manifest(p, documents=4, tokens=13, dtype="int32"),
        ["documents is 4, but the dataset has 3", "tokens is 13, but the dataset has 12", "dtype is int32, but the dataset has uint16"],
    ),
    "no word of the tokenizer": (
        lambda p: put_manifest(p, tokenizer={"name": "t"}),
        ["says nothing of its tokenizer's fingerprint, vocab_size, bos, eos"],
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage(dataset, case):
    damage, sentences = DAMAGE[case]
    damage(dataset)
    code, said = run("verify", dataset)
    lines = said.err.splitlines()
    assert code == 2 and len(lines) == len(sentences), said.err
    assert all(line.startswith("error: ") and sentence in line for line, sentence in zip(lines, sentences, strict=True)), said.err
    code, said = run("verify", dataset, "--json")
    report = json.loads(said.out)
    assert (code, report["sound"], said.err) == (2, False, "") and [f"error: {problem}" for problem in report["problems"]] == lines


def test_documents_that_were_cut_need_no_end(tmp_path):
    documents = [[1, 5, 2], [1, 5], [1, 6, 2]]
    assert verify(write_dataset(tmp_path / "told", documents, cut=[1])) == []
    assert len(verify(write_dataset(tmp_path / "untold", documents))) == 1


def test_one_token_may_be_bos_and_eos(tmp_path):
    tokenizer = TOKENIZER | {"bos": 2, "eos": 2}
    assert verify(write_dataset(tmp_path / "both", [[2, 5, 2], [2, 6, 7, 2]], tokenizer=tokenizer)) == []
    assert verify(write_dataset(tmp_path / "end", [[5, 2], [6, 7, 2]], tokenizer=tokenizer, adds_bos=False)) == []
    [said] = verify(write_dataset(tmp_path / "inside", [[5, 2, 5, 2]], tokenizer=tokenizer, adds_bos=False))
    assert "1 tokens are BOS or EOS (2) where the manifest puts none" in said


def test_pieces_are_counted_together(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.indexed_dataset.PIECE_TOKENS", 8)
    monkeypatch.setattr("data_prep.indexed_dataset.PIECE_DOCUMENTS", 4)
    documents = [[1, 5, 2]] * 7 + [[1, 5, 5]] * 6
    [said] = verify(write_dataset(tmp_path / "documents", documents))
    assert "6 documents do not end with EOS (2), the first in document 7" in said


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory) -> Path:
    """A folder with a tokenizer and two documents made by it."""
    folder = tmp_path_factory.mktemp("tokenized")
    (folder / "a.jsonl").write_text('{"text": "to be or not to be"}\n{"text": "that is the question"}\n')
    source = ("--source", "jsonl", "--input", folder / "a.jsonl")
    assert run("train-tokenizer", *source, "--vocab-size", 280, "--output", folder / "t.model")[0] == 0
    assert run("train-tokenizer", *source, "--vocab-size", 279, "--output", folder / "other.model")[0] == 0
    assert run("tokenize", *source, "--tokenizer", folder / "t.model", "--output", folder, "--workers", 1)[0] == 0
    return folder


def test_the_tokenizer_is_compared(tokenized):
    assert run("verify", tokenized / "documents", "--tokenizer", tokenized / "t.model")[0] == 0
    code, said = run("verify", tokenized / "documents", "--tokenizer", tokenized / "other.model")
    assert code == 2 and "its tokenizer t.model has fingerprint sha256:" in said.err
    assert "its tokenizer t.model has vocab_size 280, but --tokenizer other.model has 279" in said.err


def test_inspect(tokenized, tmp_path):
    prefix = tokenized / "documents"
    code, last = run("inspect", prefix, -1)
    assert code == 0 and run("inspect", prefix, 1, "--tokenizer", tokenized / "t.model") == (0, last)
    first_line, ids, *text = last.out.splitlines()
    assert first_line.startswith("document 1, ") and text == ["text:", "that is the question"]
    numbers = [int(word) for word in ids.removeprefix("ids: ").split()]
    assert numbers[0] == 1 and numbers[-1] == 2 and f"{len(numbers)} tokens" in first_line
    for number in (2, -3):
        code, said = run("inspect", prefix, number)
        assert code == 2 and said.err == f"error: {prefix} has 2 documents, 0 to 1, or -1 to -2 from the end: not {number}\n"
    code, said = run("inspect", prefix, 0, "--tokenizer", tokenized / "other.model")
    assert code == 2 and "was made with the tokenizer t.model (sha256:" in said.err
    code, said = run("inspect", write_dataset(tmp_path / "made", DOCUMENTS), 0)
    assert code == 0 and said.out == "document 0, 4 tokens\nids: 1 7 8 2\ntext: its tokenizer is not at hand; give --tokenizer\n"
