"""`split`: train and valid are disjoint, complete, and the same for the same seed."""

import json
from pathlib import Path

import numpy as np
import pytest

from data_prep.cli import main
from data_prep.draw import document_keys, largest_key
from data_prep.indexed_dataset import IndexedDataset, IndexedDatasetWriter, token_dtype
from data_prep.manifest import Manifest, read_manifest, sha256_file


@pytest.fixture
def dataset(tmp_path) -> Path:
    """200 documents; the first token of each is its number."""
    prefix = tmp_path / "documents"
    write_dataset(prefix, 200)
    return prefix


def write_dataset(prefix: Path, documents: int) -> None:
    generator = np.random.default_rng(5)
    writer = IndexedDatasetWriter(Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), token_dtype(4096))
    for number in range(documents):
        writer.add([number, *generator.integers(0, 4096, generator.integers(1, 400)).tolist()])
    tokenizer = {"name": "t.model", "kind": "sentencepiece", "fingerprint": "sha256:0", "vocab_size": 4096, "bos": 1, "eos": 2}
    source = {"kind": "jsonl", "inputs": [], "text_key": "text"}
    manifest = Manifest.of(writer.finish(), tokenizer=tokenizer, adds_bos=True, adds_eos=True, source=source, options={})
    Path(f"{prefix}.manifest.json").write_text(manifest.to_json())


def split(prefix: Path, output: Path, *more: str) -> int:
    try:
        return main(["split", "--input", str(prefix), "--output", str(output), *more])
    except SystemExit as leaving:
        return int(leaving.code or 0)


def numbers(prefix: Path) -> list[int]:
    part = IndexedDataset(prefix)
    return [int(part[index][0]) for index in range(len(part))]


def test_parts_are_disjoint_complete_and_in_order(dataset, tmp_path):
    assert split(dataset, tmp_path / "out", "--valid-fraction", "0.2") == 0
    train, valid = numbers(tmp_path / "out" / "train"), numbers(tmp_path / "out" / "valid")
    assert train == sorted(train) and valid == sorted(valid)
    assert sorted(train + valid) == list(range(200))
    whole, part = IndexedDataset(dataset), IndexedDataset(tmp_path / "out" / "valid")
    assert all(np.array_equal(part[index], whole[number]) for index, number in enumerate(valid))
    # Enough tokens, and not one document more.
    assert 0.2 <= len(part.tokens) / len(whole.tokens) < 0.2 + max(part.lengths) / len(whole.tokens)
    assert valid != list(range(len(valid)))


def test_manifests_say_where_the_parts_come_from(dataset, tmp_path):
    assert split(dataset, tmp_path / "out", "--seed", "3") == 0
    origin = read_manifest(dataset)
    for part in ("train", "valid"):
        manifest = read_manifest(tmp_path / "out" / part)
        assert manifest.bin_sha256 == sha256_file(tmp_path / "out" / f"{part}.bin")
        assert (manifest.tokenizer, manifest.adds_bos, manifest.adds_eos) == (origin.tokenizer, True, True)
        described = json.loads((tmp_path / "out" / f"{part}.manifest.json").read_text())["split"]
        source = {"path": str(dataset), "bin_sha256": origin.bin_sha256}
        assert described == {"part": part, "from": source, "seed": 3, "valid_fraction": 0.05}


def chosen(lengths: np.ndarray, tokens: float, seed: int) -> np.ndarray:
    return document_keys(np.arange(len(lengths)), seed) <= np.uint64(largest_key(lambda: np.array_split(lengths, 3), tokens, seed))


def test_the_seed_alone_decides():
    lengths = np.full(1_000, 10, np.int32)
    first, again, other = (chosen(lengths, 500.0, seed) for seed in (0, 0, 1))
    assert first.sum() == 50 and np.array_equal(first, again) and not np.array_equal(first, other)
    # Fixed values: a later version must draw the same documents, or old runs could not be compared.
    assert np.flatnonzero(first)[:5].tolist() == [38, 39, 47, 51, 67]


def test_drawing_by_the_largest_key_is_sorting_all_keys():
    """200,000 documents: several share their keys' first bits."""
    lengths = np.random.default_rng(1).integers(1, 1_000, 200_000).astype(np.int32)
    order = np.argsort(document_keys(np.arange(len(lengths)), 7))
    reached = np.cumsum(lengths[order], dtype=np.int64)
    for tokens in (1, 12_345, 0.3 * reached[-1], reached[1_000], reached[1_000] + 1, reached[-1], reached[-1] + 1):
        expected = np.zeros(len(lengths), bool)
        expected[order[: np.searchsorted(reached, tokens) + 1]] = True
        assert np.array_equal(chosen(lengths, tokens, 7), expected)


def test_a_finished_split_is_kept_and_another_needs_overwrite(dataset, tmp_path, capsys):
    assert split(dataset, tmp_path / "out") == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert split(dataset, tmp_path / "out") == 0
    assert "already complete" in capsys.readouterr().out
    assert split(dataset, tmp_path / "out", "--seed", "1") == 2
    assert "split.seed 0 -> 1" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    assert split(dataset, tmp_path / "out", "--seed", "1", "--overwrite") == 0
    assert read_manifest(tmp_path / "out" / "valid").split["seed"] == 1


def test_half_a_split_is_done_again(dataset, tmp_path):
    assert split(dataset, tmp_path / "out") == 0
    before = sha256_file(tmp_path / "out" / "valid.bin")
    for suffix in (".bin", ".idx", ".manifest.json"):
        (tmp_path / "out" / f"valid{suffix}").unlink()
    assert split(dataset, tmp_path / "out") == 0
    assert sha256_file(tmp_path / "out" / "valid.bin") == before


def test_what_cannot_be_split(dataset, tmp_path, capsys):
    write_dataset(tmp_path / "one", 1)
    assert split(tmp_path / "one", tmp_path / "out") == 2
    assert "leaves no document to train" in capsys.readouterr().err
    assert split(tmp_path / "nothing", tmp_path / "out") == 2
    assert "is no finished dataset" in capsys.readouterr().err
    assert split(dataset, tmp_path / "out", "--valid-fraction", "1") == 2
    content = bytearray(Path(f"{dataset}.bin").read_bytes())
    content[100] ^= 1
    Path(f"{dataset}.bin").write_bytes(content)
    assert split(dataset, tmp_path / "out") == 2
    assert "SHA-256" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_share_far_from_the_one_asked_for_is_said(dataset, tmp_path, capsys):
    assert split(dataset, tmp_path / "near", "--valid-fraction", "0.2") == 0 and "warning" not in capsys.readouterr().err
    write_dataset(tmp_path / "few", 3)
    assert split(tmp_path / "few", tmp_path / "far", "--valid-fraction", "0.01") == 0
    assert f"warning: {tmp_path / 'far/valid'} holds " in capsys.readouterr().err
