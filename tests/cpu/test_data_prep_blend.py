"""`blend`: exactly so many tokens, by weight, no document twice, the same for the same seed."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data_prep.blend import blend_datasets
from data_prep.indexed_dataset import IndexedDataset
from data_prep.manifest import read_manifest, sha256_file
from data_prep.merge import merge_datasets
from data_prep.split import split
from data_prep.verify import verify
from hybrid_megatron.errors import DataError
from tests.cpu.token_files import TOKENIZER, documents_of, run, write_dataset

LONGEST = 40
LARGE = TOKENIZER | {"vocab_size": 100_000}


def source(prefix: Path, first: int, documents: int) -> Path:
    """Documents that differ: the token after BOS counts from `first`."""
    random = np.random.default_rng(first)
    made = [[1, first + number, *random.integers(3, 400, random.integers(1, LONGEST - 3)), 2] for number in range(documents)]
    return write_dataset(prefix, made, tokenizer=LARGE)


@pytest.fixture
def sources(tmp_path) -> list[Path]:
    return [source(tmp_path / "a", 10_000, 300), source(tmp_path / "b", 20_000, 500), source(tmp_path / "c", 30_000, 200)]


def test_exactly_so_many_tokens_by_weight(sources, tmp_path):
    words = [word for pair in zip((5, 3, 2), sources, strict=True) for word in pair]
    code, said = run("blend", "--input", *words, "--tokens", "6K", "--output", tmp_path / "out" / "mix", "--seed", 4)
    assert code == 0, said.err
    drawn, manifest = documents_of(tmp_path / "out" / "mix"), read_manifest(tmp_path / "out" / "mix")
    assert sum(map(len, drawn)) == manifest.tokens == 6_000
    assert manifest.options == {"weights": [0.5, 0.3, 0.2], "tokens": 6_000, "seed": 4, "repeat": False}
    assert [entry["path"] for entry in manifest.source["inputs"]] == [str(prefix) for prefix in sources]
    originals = {document[1]: document for prefix in sources for document in documents_of(prefix)}
    assert all(document == originals[document[1]] for document in drawn[:-1])
    assert max(Counter(document[1] for document in drawn).values()) == 1
    for first, weight, taken in zip((10_000, 20_000, 30_000), (0.5, 0.3, 0.2), manifest.blend["taken"], strict=True):
        mine = [document for document in drawn if first <= document[1] < first + 10_000]
        assert taken == {"documents": len(mine), "tokens": sum(map(len, mine)), "rounds": 1}
        assert abs(taken["tokens"] - 6_000 * weight) <= LONGEST
        numbers = [document[1] for document in mine]
        assert numbers != sorted(numbers)
    last, cut = drawn[-1], manifest.blend["cut"]
    assert cut == {"document": len(drawn) - 1, "tokens": len(last), "of": len(originals[last[1]])} and len(last) < cut["of"]
    assert manifest.cut == [len(drawn) - 1] and last == originals[last[1]][: len(last)]
    assert f"the last document is cut to {len(last)} of its {cut['of']} tokens" in said.out
    assert verify(tmp_path / "out" / "mix") == []


def test_any_part_of_the_order_keeps_the_weights(sources, tmp_path):
    blend_datasets([(3, sources[0]), (1, sources[1])], 5_000, tmp_path / "mix")
    drawn = documents_of(tmp_path / "mix")[:-1]  # the last one may be cut to its BOS
    taken = np.array([[len(document) * (document[1] < 20_000), len(document)] for document in drawn]).cumsum(0)
    assert np.abs(taken[:, 0] - 0.75 * taken[:, 1]).max() <= LONGEST


def test_the_seed_alone_decides(sources, tmp_path):
    inputs = [(1.0, sources[0]), (1.0, sources[1])]
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        blend_datasets(inputs, 4_000, tmp_path / name, seed)
    hashes = [sha256_file(tmp_path / f"{name}.bin") for name in ("first", "again", "other")]
    assert hashes[0] == hashes[1] != hashes[2]
    # Fixed values: a later version must draw the same documents.
    drawn = [document[1] for document in documents_of(tmp_path / "first")[:6]]
    assert drawn == [10_102, 20_279, 20_176, 10_116, 20_068, 20_436]


def test_small_batches_copy_the_same(sources, tmp_path, monkeypatch):
    inputs = [(1.0, sources[0]), (2.0, sources[2])]
    blend_datasets(inputs, 3_000, tmp_path / "large")
    monkeypatch.setattr("data_prep.blend_copy.PIECE_TOKENS", 50)
    monkeypatch.setattr("data_prep.blend_copy.BATCH_DOCUMENTS", 3)
    monkeypatch.setattr("data_prep.indexed_dataset.PIECE_DOCUMENTS", 7)
    whole_reads = os.preadv  # a file system may give less than was asked for
    monkeypatch.setattr("data_prep.blend_copy.os.preadv", lambda file, views, at: whole_reads(file, [views[0][:10]], at))
    blend_datasets(inputs, 3_000, tmp_path / "small")
    for suffix in (".bin", ".idx"):
        assert sha256_file(tmp_path / f"small{suffix}") == sha256_file(tmp_path / f"large{suffix}")


def test_more_than_there_is_needs_repeat(sources, tmp_path):
    held = [read_manifest(prefix).tokens for prefix in sources]
    words = ["--input", 1, sources[0], 1, sources[1], "--output", tmp_path / "mix"]
    code, said = run("blend", *words, "--tokens", 2 * held[0] + 1)
    assert code == 2 and said.err.count("\n") == 1
    assert f"{sources[0]} holds {held[0]:,} and its share is {held[0] + 1:,}; ask for at most {2 * held[0]:,}" in said.err
    assert run("blend", *words, "--tokens", 2 * held[0])[0] == 0
    drawn = Counter(document[1] for document in documents_of(tmp_path / "mix") if document[1] < 20_000)
    assert len(drawn) >= 299 and max(drawn.values()) == 1

    tokens = 5 * held[0]
    assert run("blend", *words, "--tokens", tokens, "--repeat", "--overwrite")[0] == 0
    manifest = read_manifest(tmp_path / "mix")
    assert manifest.tokens == tokens and [taken["rounds"] for taken in manifest.blend["taken"]] == [3, -(-tokens // 2 // held[1])]
    numbers = [document[1] for document in documents_of(tmp_path / "mix") if document[1] < 20_000]
    rounds = [numbers[:300], numbers[300:600]]
    assert sorted(rounds[0]) == sorted(rounds[1]) == list(range(10_000, 10_300)) and rounds[0] != rounds[1]
    assert verify(tmp_path / "mix") == []


def test_a_finished_blend_is_kept_and_another_needs_overwrite(sources, tmp_path):
    inputs = [(1.0, sources[0]), (1.0, sources[1])]
    assert blend_datasets(inputs, 1_000, tmp_path / "mix")[1]
    assert not blend_datasets([(2.0, sources[0]), (2.0, sources[1])], 1_000, tmp_path / "mix")[1], "the same shares"
    with pytest.raises(DataError, match="options.tokens 1000 -> 1001; add --overwrite"):
        blend_datasets(inputs, 1_001, tmp_path / "mix")
    assert blend_datasets(inputs, 1_001, tmp_path / "mix", overwrite=True)[0].tokens == 1_001


def test_cut_documents_are_known_after_merge_split_and_blend(sources, tmp_path, monkeypatch):
    """What is cut once has no end wherever it goes."""
    cut, _ = blend_datasets([(1.0, sources[0])], 1_001, tmp_path / "mix")
    assert len(cut.cut) == 1
    merged, _ = merge_datasets([sources[1], tmp_path / "mix", sources[2]], tmp_path / "all")
    assert merged.cut == [500 + cut.cut[0]]
    monkeypatch.setattr("data_prep.indexed_dataset.PIECE_TOKENS", 500)
    parts, _ = split(tmp_path / "all", tmp_path, 0.4)
    assert len(parts["train"].cut) + len(parts["valid"].cut) == 1
    again, _ = blend_datasets([(1.0, tmp_path / "all")], merged.tokens, tmp_path / "again")
    assert len(again.cut) == 1
    [end] = [documents_of(tmp_path / "again")[number] for number in again.cut]
    assert end == documents_of(tmp_path / "mix")[-1] and end[-1] != 2
    for name in ("mix", "all", "train", "valid", "again"):
        assert verify(tmp_path / name) == []


WRONG = {
    "no weight": (["{a}", "{b}"], "give a weight before each dataset"),
    "odd": (["1", "{a}", "2"], "give a weight before each dataset"),
    "zero": (["0", "{a}", "2", "{b}"], "a weight is a number above 0"),
    "nan": (["nan", "{a}"], "a weight is a number above 0"),
    "twice": (["1", "{a}", "2", "{a}"], "are the same data; give it once, with one weight"),
    "itself": (["1", "{a}", "2", "{out}"], "is also an --input"),
    "missing": (["1", "{a}", "2", "{a}x"], "is no finished dataset"),
    "another tokenizer": (["1", "{a}", "2", "{small}"], "tokenizer.vocab_size 100000 -> 400"),
    "damaged index": (["1", "{a}", "2", "{damaged}"], "is damaged: its SHA-256"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_blended(sources, tmp_path, case):
    words, sentence = WRONG[case]
    write_dataset(tmp_path / "small", [[1, 5, 2]])
    damaged = source(tmp_path / "damaged", 40_000, 50)
    manifest = read_manifest(damaged)
    Path(f"{damaged}.manifest.json").write_text(manifest.to_json().replace(manifest.idx_sha256, "0" * 64))
    names = {"a": sources[0], "b": sources[1], "small": tmp_path / "small", "damaged": damaged, "out": tmp_path / "mix"}
    code, said = run("blend", "--input", *(word.format(**names) for word in words), "--tokens", 100, "--output", tmp_path / "mix")
    assert code == 2 and said.err.startswith("error: ") and said.err.count("\n") == 1 and sentence in said.err
    assert not list(tmp_path.glob("mix*"))


def test_offsets_beyond_2_to_32_bytes(tmp_path):
    """A sparse dataset of 1.2e9 tokens, documents of a million; each begins with its number."""
    from data_prep.blend_copy import copy_documents
    from data_prep.indexed_dataset import token_dtype, write_index

    dtype, length = token_dtype(100_000), 1_000_000
    write_index(tmp_path / "large.idx", dtype, 1_200, lambda: [np.full(1_200, length, np.int32)])
    with open(tmp_path / "large.bin", "wb") as file:
        file.truncate(4 * 1_200 * length)
        for document in (0, 1_100, 1_199):
            file.seek(4 * length * document)
            file.write(np.array([document + 1], "<i4").tobytes())
    dataset = IndexedDataset(tmp_path / "large")
    wanted = np.array([1_199, 0, 1_100])
    copy_documents([dataset], np.zeros(3, np.int32), wanted, np.array([5, 5, 5], np.int32), tmp_path / "out.bin", tmp_path / "out.idx")
    assert documents_of(tmp_path / "out") == [[1_200, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1_101, 0, 0, 0, 0]]
