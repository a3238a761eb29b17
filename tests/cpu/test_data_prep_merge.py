"""`merge`: documents in order, the manifest lists the parts, memory stays small, and neither 2^31 tokens nor 2^32 bytes are a border."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.indexed_dataset import IndexedDataset, token_dtype, write_index
from data_prep.manifest import read_manifest, sha256_file
from data_prep.merge import merge_datasets
from data_prep.split import split
from hybrid_megatron.errors import DataError
from tests.cpu.token_files import TOKENIZER, documents_of, run, write_dataset


def test_documents_follow_each_other_and_the_manifest_lists_the_parts(tmp_path):
    parts = {"a": [[1, 7, 2], [1, 8, 8, 2]], "b": [[1, 9, 2]], "c": [[1, 5, 6, 2]]}
    prefixes = [write_dataset(tmp_path / name / "documents", documents) for name, documents in parts.items()]
    code, said = run("merge", "--input", *(f"{prefix}.bin" for prefix in prefixes), "--output", tmp_path / "all" / "pile")
    assert code == 0 and "4 documents, 14 tokens" in said.out and "3 parts" in said.out
    assert documents_of(tmp_path / "all" / "pile") == sum(parts.values(), [])
    manifest = read_manifest(tmp_path / "all" / "pile")
    assert manifest.bin_sha256 == sha256_file(tmp_path / "all" / "pile.bin")
    assert manifest.idx_sha256 == sha256_file(tmp_path / "all" / "pile.idx")
    assert manifest.source["kind"] == "merge"
    for described, prefix in zip(manifest.source["inputs"], prefixes, strict=True):
        origin = read_manifest(prefix)
        assert (described["path"], described["sha256"], described["idx_sha256"]) == (str(prefix), origin.bin_sha256, origin.idx_sha256)
        assert (described["documents"], described["tokens"]) == (origin.documents, origin.tokens)
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["pile.bin", "pile.idx", "pile.manifest.json"]


def test_a_glob_in_quotes(tmp_path):
    for name in "cab":
        write_dataset(tmp_path / name / "documents", [[1, ord(name) - 90, 2]])
    assert run("merge", "--input", f"{tmp_path}/*/documents.bin", "--output", tmp_path / "all")[0] == 0
    assert documents_of(tmp_path / "all") == [[1, ord(name) - 90, 2] for name in "abc"]
    code, said = run("merge", "--input", f"{tmp_path}/*/none", "--output", tmp_path / "more")
    assert code == 2 and f"--input {tmp_path}/*/none: no dataset has such a name" in said.err


def test_a_folder_instead_of_the_dataset_in_it(tmp_path):
    write_dataset(tmp_path / "text/documents", [[1, 7, 2]])
    code, said = run("stats", tmp_path / "text")
    assert code == 2 and f"in this folder there is {tmp_path}/text/documents" in said.err


def test_what_is_rejected_dropped_and_cut_is_summed(tmp_path):
    told = {"rejected": {"count": 3, "by_reason": {"bad_json": 3}}, "dropped": {"too_short": 2}, "cut": [1]}
    prefixes = [write_dataset(tmp_path / name, [[1, 4, 2], [1, 4]], **told) for name in "ab"]
    manifest, _ = merge_datasets(prefixes, tmp_path / "all")
    assert manifest.rejected == {"count": 6, "by_reason": {"bad_json": 6}}
    assert (manifest.dropped, manifest.cut) == ({"too_short": 4}, [1, 3])


def test_a_finished_merge_is_kept_and_another_needs_overwrite(tmp_path):
    prefixes = [write_dataset(tmp_path / name, [[1, number, 2]]) for number, name in enumerate("abc", 5)]
    output = tmp_path / "all"
    assert merge_datasets(prefixes, output)[1]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert not merge_datasets(prefixes, output)[1]
    with pytest.raises(DataError, match="2 files.*or other contents.*--overwrite"):
        merge_datasets(prefixes[:2], output)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert merge_datasets(prefixes[:2], output, overwrite=True)[0].documents == 2


OTHERS = {
    "tokenizer": ({"tokenizer": TOKENIZER | {"fingerprint": "sha256:1"}}, "tokenizer.fingerprint 'sha256:0' -> 'sha256:1'"),
    "type": ({"tokenizer": TOKENIZER | {"vocab_size": 128_256}}, "dtype 'uint16' -> 'int32'; tokenizer.vocab_size 400 -> 128256"),
    "EOS": ({"adds_eos": False}, "adds_eos True -> False"),
    "BOS": ({"adds_bos": False}, "adds_bos True -> False"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_parts_that_do_not_go_together(tmp_path, case):
    otherwise, sentence = OTHERS[case]
    same, other, last = tmp_path / "same", tmp_path / "other", tmp_path / "last"
    write_dataset(same, [[1, 4, 2]], tokenizer=TOKENIZER | {"name": "copy.model"})
    for prefix in (other, last):
        write_dataset(prefix, [[1, 5, 2]], **otherwise)
    code, said = run("merge", "--input", same, same, other, last, "--output", tmp_path / "all")
    assert code == 2 and said.err.startswith(f"error: {other} differs from {same} in {sentence};") and said.err.count("\n") == 1
    assert not list(tmp_path.glob("all*"))


def test_damaged_parts_leave_no_output(tmp_path):
    first, second = (write_dataset(tmp_path / name, [[1, 4, 2], [1, 9, 9, 2]]) for name in "ab")
    content = bytearray(Path(f"{second}.bin").read_bytes())
    content[4] ^= 1
    Path(f"{second}.bin").write_bytes(content)
    code, said = run("merge", "--input", first, second, "--output", tmp_path / "out" / "all")
    assert code == 2 and said.err.startswith(f"error: {second}.bin is damaged: its SHA-256") and said.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
    code, said = run("merge", "--input", first, "--output", first)
    assert code == 2 and "is also an --input" in said.err
    code, said = run("merge", "--input", first, tmp_path / "nothing", "--output", tmp_path / "all")
    assert code == 2 and "is no finished dataset" in said.err


DOCUMENTS = st.lists(st.lists(st.integers(0, 399), min_size=1, max_size=40), min_size=1, max_size=30)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(parts=st.lists(DOCUMENTS, min_size=1, max_size=4), seed=st.integers(0, 99), large=st.booleans())
def test_any_documents_come_back_through_merge_split_and_megatron(parts, seed, large, tmp_path_factory):
    """Pieces of 16 tokens and 8 documents, so that every border between pieces is met."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset

    def read(prefix: Path) -> list[list[int]]:
        theirs = MegatronDataset(str(prefix))
        assert theirs.document_indices.tolist() == list(range(len(theirs) + 1))
        return [theirs[number].tolist() for number in range(len(theirs))]

    folder = tmp_path_factory.mktemp("any")
    tokenizer = TOKENIZER | {"vocab_size": 128_256 if large else 400}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_prep.indexed_dataset.PIECE_TOKENS", 16)
        patch.setattr("data_prep.indexed_dataset.PIECE_DOCUMENTS", 8)
        prefixes = [write_dataset(folder / str(number), documents, tokenizer=tokenizer) for number, documents in enumerate(parts)]
        assert [read(prefix) for prefix in prefixes] == parts
        merge_datasets(prefixes, folder / "all")
        everything = sum(parts, [])
        assert documents_of(folder / "all") == read(folder / "all") == everything
        if len(everything) > 1:
            try:
                split(folder / "all", folder, 0.3, seed)
            except DataError as error:
                assert "leaves no document to train" in str(error)
                return
            train, valid = read(folder / "train"), read(folder / "valid")
            assert sorted(train + valid) == sorted(everything)
            assert is_subsequence(train, everything) and is_subsequence(valid, everything)


def is_subsequence(part: list, whole: list) -> bool:
    rest = iter(whole)
    return all(document in rest for document in part)


def test_more_than_2_to_31_tokens_and_2_to_32_bytes(tmp_path):
    """Two parts of 1.5e9 tokens each, holes on disk but for the ends of a few documents, indices merged as `merge` does it."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset

    dtype = token_dtype(128_256)
    lengths = np.full(1_500_000, 1_000, np.int32)
    lengths[::2] -= 7
    lengths[1::2] += 7
    marked = (0, 749_999, 1_499_999)
    for part in (0, 1):
        write_index(tmp_path / f"{part}.idx", dtype, len(lengths), lambda: [lengths])
        with open(tmp_path / f"{part}.bin", "wb") as file:
            file.truncate(4 * 1_500_000_000)
    parts = [IndexedDataset(tmp_path / str(part)) for part in (0, 1)]
    write_index(tmp_path / "all.idx", dtype, 3_000_000, lambda: (piece for part in parts for piece in part.length_pieces()))
    with open(tmp_path / "all.bin", "r+b" if (tmp_path / "all.bin").exists() else "w+b") as file:
        file.truncate(4 * 3_000_000_000)
        for document in (*marked, *(1_500_000 + number for number in marked)):
            start = 1_000 * document - (7 if document % 2 else 0)
            length = 1_007 if document % 2 else 993
            file.seek(4 * start)
            file.write(np.array([document], "<i4").tobytes())
            file.seek(4 * (start + length - 1))
            file.write(np.array([-document], "<i4").tobytes())
    ours, theirs = IndexedDataset(tmp_path / "all"), MegatronDataset(str(tmp_path / "all"))
    assert len(ours) == len(theirs) == 3_000_000 and len(ours.tokens) == 3_000_000_000 > 2**31
    assert int(theirs.index.sequence_pointers[-1]) == 4 * (3_000_000_000 - 1_007) > 2**32
    for document in (*marked, *(1_500_000 + number for number in marked)):
        for tokens in (ours[document], theirs[document]):
            assert len(tokens) == (1_007 if document % 2 else 993)
            assert (int(tokens[0]), int(tokens[-1]), int(np.abs(tokens[1:-1]).max())) == (document, -document, 0)


MEASURE = """
import json, re, sys
from pathlib import Path
import numpy as np
from data_prep.merge import merge_datasets
from tests.cpu.token_files import write_arrays
folder, parts, documents = Path(sys.argv[1]), 2_000, 12_000
lengths = np.full(documents, 2, np.int32)
write_arrays(folder / "part", np.tile(np.array([1, 2], "<u2"), documents), lengths)
for number in range(parts):
    for suffix in (".bin", ".idx", ".manifest.json"):
        Path(f"{folder}/{number}{suffix}").symlink_to(f"{folder}/part{suffix}")
manifest, _ = merge_datasets([folder / str(number) for number in range(parts)], folder / "all")
# not ru_maxrss, which keeps what the process that started this one held
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
print(json.dumps({"documents": manifest.documents, "peak": peak}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
def test_merging_2000_parts_takes_little_memory(tmp_path):
    """24 million documents, whose lengths, offsets and borders are 480 MB on disk."""
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["documents"] == 24_000_000
    assert measured["peak"] < 200_000, "kB, of which Python and numpy are about 40,000"
