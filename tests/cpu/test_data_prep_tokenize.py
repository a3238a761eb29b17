"""`tokenize`: what a dataset holds, what is rejected, and that a dataset is whole or not there."""

import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zstandard

from data_prep.cli import main
from data_prep.indexed_dataset import IndexedDataset
from data_prep.manifest import read_manifest, sha256_file
from data_prep.publish import Staging
from data_prep.tokenizers import load
from hybrid_megatron.errors import DataError

REPOSITORY = Path(__file__).parents[2]
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards quietly mix potions under bright northern skies".split()


def sentence(number: int) -> str:
    return " ".join(WORDS[(number * step + step) % len(WORDS)] for step in range(1, 9)) + f" {number}."


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    corpus = write_jsonl(folder / "corpus.jsonl", [sentence(number) for number in range(300)])
    path = folder / "tokenizer.model"
    assert main(["train-tokenizer", "--source", "jsonl", "--input", str(corpus), "--vocab-size", "400", "--output", str(path)]) == 0
    return path


def tokenize(model: Path, source: str, inputs: Path | list, output: Path, *more: str) -> int:
    """The exit code of the command."""
    names = [str(name) for name in (inputs if isinstance(inputs, list) else [inputs])]
    words = ["tokenize", "--source", source, "--tokenizer", str(model), "--input", *names, "--output", str(output), "--workers", "1", *more]
    try:
        return main(words)
    except SystemExit as leaving:
        return int(leaving.code or 0)


def texts_of(model: Path, output: Path) -> list[str]:
    tokenizer, dataset = load(model), IndexedDataset(output / "documents")
    return [tokenizer.decode(dataset[index][1:-1].tolist()) for index in range(len(dataset))]


def files_of(folder: Path) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in sorted(folder.iterdir()) if path.is_file()}


def test_documents_come_back_in_order_between_bos_and_eos(model, tmp_path):
    texts = [sentence(number) for number in range(50)] + ["one\n\n  two\ttabs ", "é 日本 \0 x", "<s>not special</s>"]
    assert tokenize(model, "jsonl", write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "out") == 0
    assert texts_of(model, tmp_path / "out") == texts
    dataset = IndexedDataset(tmp_path / "out" / "documents")
    assert all(dataset[index][0] == 1 and dataset[index][-1] == 2 for index in range(len(dataset)))
    assert all(1 not in dataset[index][1:-1] and 2 not in dataset[index][1:-1] for index in range(len(dataset)))


def test_megatron_reads_the_same_documents(model, tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset

    from data_prep.indexed_dataset import IndexedDatasetWriter, token_dtype

    assert tokenize(model, "jsonl", write_jsonl(tmp_path / "a.jsonl", [sentence(number) for number in range(20)]), tmp_path) == 0
    ours, theirs = IndexedDataset(tmp_path / "documents"), MegatronDataset(str(tmp_path / "documents"))
    assert len(theirs) == 20 and theirs.index.dtype is np.uint16
    assert theirs.document_indices.tolist() == list(range(21))
    assert all(np.array_equal(ours[index], theirs[index]) for index in range(20))

    documents = [[0, 128_255], [65_536], list(range(70_000, 70_100))]
    writer = IndexedDatasetWriter(tmp_path / "large.bin", tmp_path / "large.idx", token_dtype(128_256))
    for document in documents:
        writer.add(document)
    assert writer.finish().dtype == "int32"
    theirs = MegatronDataset(str(tmp_path / "large"))
    assert [theirs[index].tolist() for index in range(3)] == documents
    assert (token_dtype(65_499).name, token_dtype(65_500).name) == ("uint16", "int32")


def test_manifest_states_counts_hashes_and_origin(model, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [sentence(number) for number in range(9)])
    assert tokenize(model, "jsonl", source, tmp_path / "out", "--no-bos") == 0
    values = json.loads((tmp_path / "out" / "documents.manifest.json").read_text())
    dataset = IndexedDataset(tmp_path / "out" / "documents")
    assert (values["format"], values["documents"], values["tokens"], values["dtype"]) == (1, 9, len(dataset.tokens), "uint16")
    for suffix in ("bin", "idx"):
        path = tmp_path / "out" / f"documents.{suffix}"
        assert (values[f"{suffix}_bytes"], values[f"{suffix}_sha256"]) == (path.stat().st_size, sha256_file(path))
    assert values["tokenizer"] == {
        "name": "tokenizer.model",
        "kind": "sentencepiece",
        "fingerprint": f"sha256:{sha256_file(model)}",
        "vocab_size": 400,
        "bos": 1,
        "eos": 2,
    }
    assert (values["adds_bos"], values["adds_eos"]) == (False, True)
    assert dataset[0][0] != 1 and dataset[0][-1] == 2
    status = source.stat()
    expected = {"path": str(source), "bytes": status.st_size, "modified_ns": status.st_mtime_ns, "sha256": sha256_file(source)}
    assert values["source"]["inputs"] == [expected]
    assert values["rejected"] == {"count": 0, "by_reason": {}}


BAD_LINES = {
    "bad_json": b'{"text": "cut of',
    "not_an_object": b'["text"]',
    "missing_key": b'{"body": "x"}',
    "not_a_string": b'{"text": 7}',
    "empty_text": b'{"text": " \\n\\t"}',
    "lone_surrogate": b'{"text": "a\\ud800b"}',
    "invalid_utf8": b'{"text": "\xff"}',
}


def test_every_malformed_record_is_listed_with_its_line(model, tmp_path, capsys):
    good = json.dumps({"text": sentence(1)}).encode()
    deep = b'{"text": ' + b"[" * 200_000
    lines = [good, *BAD_LINES.values(), b"", deep, good]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    assert tokenize(model, "jsonl", tmp_path / "a.jsonl", tmp_path / "out", "--max-reject-fraction", "0.9") == 0
    rejects = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    expected = [(line, reason) for line, reason in enumerate(BAD_LINES, start=2)] + [(10, "bad_json")]
    assert [(reject["line"], reject["reason"]) for reject in rejects] == expected
    assert {reject["file"] for reject in rejects} == {str(tmp_path / "a.jsonl")}
    manifest = read_manifest(tmp_path / "out" / "documents")
    assert manifest.documents == 2 and manifest.dropped == {"too_short": 0, "blank_lines": 1}
    assert manifest.rejected == {"count": 8, "by_reason": dict.fromkeys(sorted(BAD_LINES), 1) | {"bad_json": 2}}
    assert "rejected 8 records" in capsys.readouterr().out


def test_too_many_rejects_stop_the_job_and_leave_no_dataset(model, tmp_path, capsys):
    good = json.dumps({"text": sentence(1)}).encode()
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([good] * 9 + [BAD_LINES["bad_json"]]))
    assert tokenize(model, "jsonl", tmp_path / "a.jsonl", tmp_path / "out") == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["parts", "rejects.jsonl"]
    message = capsys.readouterr().err
    assert message.startswith("error: 1 of 10 records are rejected") and "a.jsonl, line 10: bad_json" in message
    assert tokenize(model, "jsonl", tmp_path / "a.jsonl", tmp_path / "out", "--max-reject-fraction", "0.1") == 0
    assert sorted(files_of(tmp_path / "out")) == [f"documents.{suffix}" for suffix in ("bin", "idx", "manifest.json")] + ["rejects.jsonl"]


def test_a_failed_job_leaves_the_finished_dataset_and_its_rejects(model, tmp_path):
    assert tokenize(model, "jsonl", write_jsonl(tmp_path / "a.jsonl", [sentence(1)]), tmp_path / "out") == 0
    before = files_of(tmp_path / "out")
    (tmp_path / "b.jsonl").write_text("{\n")
    assert tokenize(model, "jsonl", tmp_path / "b.jsonl", tmp_path / "out", "--overwrite") == 2
    after = files_of(tmp_path / "out")
    assert {name: after[name] for name in before} == before and set(after) - set(before) == {"rejects.failed.jsonl"}


def test_a_wrong_key_is_told_before_the_whole_corpus_is_read(model, tmp_path, capsys):
    write_jsonl(tmp_path / "a.jsonl", ["x"] * 20_000)
    assert tokenize(model, "jsonl", tmp_path / "a.jsonl", tmp_path / "out", "--text-key", "body") == 2
    said = capsys.readouterr().err
    assert "of the first 1000 records are rejected (1000 missing_key)" in said and "(it has text, not body)" in said
    assert said.endswith("; give the key of the text as --text-key\n")


def test_what_was_wrong_is_mended_in_the_same_folder(model, tmp_path):
    """Parts without a document are no reason to ask for --overwrite; others are."""
    write_jsonl(tmp_path / "a.jsonl", [sentence(1)] * 3)
    job = (model, "jsonl", tmp_path / "a.jsonl", tmp_path / "out")
    assert tokenize(*job, "--text-key", "body") == 2 and list((tmp_path / "out/parts").glob("*.manifest.json"))
    assert tokenize(*job) == 0
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("{\n")
    job = (*job[:3], tmp_path / "other")
    assert tokenize(*job) == 2 and tokenize(*job, "--no-bos") == 2 and tokenize(*job, "--no-bos", "--overwrite") == 2


def test_the_first_of_several_keys_holds_the_text(model, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "one"}\n{"text": "two", "content": "three"}\n')
    assert tokenize(model, "jsonl", tmp_path / "a.jsonl", tmp_path / "out", "--text-key", "text,content") == 0
    assert texts_of(model, tmp_path / "out") == ["one", "two"]


def test_crlf_and_byte_order_marks(model, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one\\r\\n"}\r\n{"text": "two"}\r\n')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert tokenize(model, "jsonl", tmp_path / "a.jsonl", tmp_path / "json") == 0
    assert tokenize(model, "text", tmp_path / "b.txt", tmp_path / "text") == 0
    assert texts_of(model, tmp_path / "json") == ["one\r\n", "two"]  # an escaped line end belongs to the text
    assert texts_of(model, tmp_path / "text") == ["one\ntwo\n"]


def test_compressed_files_of_several_frames_hold_the_same_documents(model, tmp_path):
    texts = [sentence(number) for number in range(30)]
    halves = [write_jsonl(tmp_path / f"{part}.jsonl", texts[15 * part : 15 * part + 15]).read_bytes() for part in (0, 1)]
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(gzip.compress(half, mtime=0) for half in halves) + bytes(512))
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(zstandard.compress(half) for half in halves))
    for name in ("a.jsonl.gz", "a.jsonl.zst"):
        assert tokenize(model, "jsonl", tmp_path / name, tmp_path / name[-3:]) == 0
        assert texts_of(model, tmp_path / name[-3:]) == texts


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_cut_off_or_damaged_file_stops_the_job(model, tmp_path, capsys, suffix):
    content = os.urandom(4_000).hex().encode()
    line = b'{"text": "%s"}\n' % content
    whole = gzip.compress(line, mtime=0) if suffix == ".gz" else zstandard.ZstdCompressor(write_checksum=True).compress(line)
    path = tmp_path / f"a.jsonl{suffix}"
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    for broken, word in ((whole[:-1], "cut off"), (whole[: len(whole) // 2], "cut off"), (b"", "empty"), (bytes(flipped), "damaged")):
        path.write_bytes(broken)
        assert tokenize(model, "jsonl", path, tmp_path / "out") == 2
        message = capsys.readouterr().err
        assert message.startswith(f"error: {path} is {word}") and message.count("\n") == 1
        assert not (tmp_path / "out").exists()


def test_text_is_a_document_a_file_or_cut_by_an_expression(model, tmp_path):
    folder = tmp_path / "texts" / "deep"
    folder.mkdir(parents=True)
    (folder / "b.txt").write_text("one<|end|>two\n<|end|>\n<|end|>three")
    (folder.parent / "a.txt").write_text("first")
    (folder / ".hidden.txt").write_text("hidden")
    (folder / "c.bin").write_text("other")
    assert tokenize(model, "text", folder.parent, tmp_path / "whole") == 0
    assert texts_of(model, tmp_path / "whole") == ["first", "one<|end|>two\n<|end|>\n<|end|>three"]
    pattern = str(tmp_path / "texts" / "**" / "*.txt")
    assert tokenize(model, "text", [pattern, folder / "b.txt"], tmp_path / "cut", "--split-on", r"<\|end\|>") == 0
    assert texts_of(model, tmp_path / "cut") == ["first", "one", "two\n", "three"]
    (folder / "b.txt").write_text("preface\nCHAPTER 1\nx\nCHAPTER 2\ny\n")
    assert tokenize(model, "text", folder / "b.txt", tmp_path / "kept", "--split-on", "(?=^CHAPTER)") == 0
    assert texts_of(model, tmp_path / "kept") == ["preface\n", "CHAPTER 1\nx\n", "CHAPTER 2\ny\n"]


def test_short_documents_are_dropped_and_counted(model, tmp_path):
    texts = ["a", sentence(3), "b"]
    assert tokenize(model, "jsonl", write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "out", "--min-tokens", "5") == 0
    assert texts_of(model, tmp_path / "out") == [sentence(3)]
    assert read_manifest(tmp_path / "out" / "documents").dropped["too_short"] == 2
    assert tokenize(model, "jsonl", tmp_path / "a.jsonl", tmp_path / "none", "--min-tokens", "500") == 2
    assert not (tmp_path / "none").exists()


def test_a_finished_dataset_is_kept_and_another_needs_overwrite(model, tmp_path, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", [sentence(number) for number in range(5)])
    out = tmp_path / "out"
    assert tokenize(model, "jsonl", source, out) == 0
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert tokenize(model, "jsonl", source, out) == 0
    assert "already complete" in capsys.readouterr().out
    assert tokenize(model, "jsonl", source, out, "--no-eos") == 2
    assert "adds_eos True -> False" in capsys.readouterr().err
    write_jsonl(source, [sentence(7)])
    assert tokenize(model, "jsonl", source, out) == 2
    assert "source.inputs" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    assert tokenize(model, "jsonl", source, out, "--overwrite") == 0
    assert texts_of(model, out) == [sentence(7)]


def test_files_without_a_manifest_are_not_replaced(model, tmp_path):
    (tmp_path / "documents.bin").write_bytes(b"someone's")
    assert tokenize(model, "jsonl", write_jsonl(tmp_path / "a.jsonl", ["x"]), tmp_path) == 2
    assert (tmp_path / "documents.bin").read_bytes() == b"someone's"


def test_a_killed_job_leaves_the_old_dataset_and_the_next_one_finishes(model, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [" ".join(sentence(number + step) for step in range(50)) for number in range(4_000)])
    old = write_jsonl(tmp_path / "old.jsonl", [sentence(1)])
    assert tokenize(model, "jsonl", old, tmp_path / "out") == 0
    before = files_of(tmp_path / "out")
    words = ["tokenize", "--source", "jsonl", "--tokenizer", str(model), "--input", str(source), "--output", str(tmp_path / "out")]
    command = [sys.executable, "-m", "data_prep", *words, "--overwrite", "--workers", "1"]
    process = subprocess.Popen(command, cwd=REPOSITORY)
    written = tmp_path / "out" / "parts" / ".00000-a.partial" / "00000-a.bin"
    while process.poll() is None and not (written.exists() and written.stat().st_size):
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "the job was over before it could be killed"
    assert files_of(tmp_path / "out") == before and written.exists()

    small = write_jsonl(source, [sentence(number) for number in range(200)])
    assert tokenize(model, "jsonl", small, tmp_path / "out", "--overwrite") == 0
    assert tokenize(model, "jsonl", small, tmp_path / "fresh") == 0
    assert files_of(tmp_path / "out") == files_of(tmp_path / "fresh")
    assert not written.parent.exists()


def test_a_job_killed_while_renaming_is_done_again_without_overwrite(model, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [sentence(1), sentence(2)])
    assert tokenize(model, "jsonl", source, tmp_path / "whole") == 0
    out = tmp_path / "out"
    (out / ".documents.partial").mkdir(parents=True)
    (out / "documents.bin").write_bytes(b"renamed already")
    with pytest.raises(DataError, match="no finished dataset"):
        read_manifest(out / "documents")
    assert tokenize(model, "jsonl", source, out) == 0
    assert files_of(out) == files_of(tmp_path / "whole")


def test_a_full_disk_leaves_the_old_dataset(model, tmp_path, capsys):
    assert tokenize(model, "jsonl", write_jsonl(tmp_path / "a.jsonl", [sentence(1)]), tmp_path / "out") == 0
    before = files_of(tmp_path / "out")
    source = write_jsonl(tmp_path / "b.jsonl", [" ".join(sentence(number + step) for step in range(500)) for number in range(20)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        assert tokenize(model, "jsonl", source, tmp_path / "out", "--overwrite") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    message = capsys.readouterr().err
    assert message.startswith(f"error: {tmp_path / 'out' / 'parts'}: the output cannot be written") and message.count("\n") == 1
    assert files_of(tmp_path / "out") == before and len(list((tmp_path / "out").iterdir())) == len(before)


def test_an_output_folder_that_cannot_be_written(model, tmp_path, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", ["x"])
    assert tokenize(model, "jsonl", source, source / "out") == 2  # its parent is a file
    message = capsys.readouterr().err
    assert message.startswith(f"error: {source / 'out'}: the output cannot be written (Not a directory)") and message.count("\n") == 1


@pytest.mark.parametrize("folder", ["locked", "locked/out"])
def test_a_read_only_output_folder(tmp_path, folder):
    (tmp_path / "locked").mkdir(mode=0o555)
    user = os.geteuid()
    if user == 0:  # nothing is read-only to root, so be nobody for a moment
        os.seteuid(65534)
    try:
        with pytest.raises(DataError, match=r"the output cannot be written \(Permission denied\).*choose another --output"):
            with Staging(tmp_path / folder, "documents"):
                pass
    finally:
        os.seteuid(user)


def test_two_jobs_do_not_write_to_one_folder(model, tmp_path, capsys):
    with Staging(tmp_path / "out", "documents"):
        assert tokenize(model, "jsonl", write_jsonl(tmp_path / "a.jsonl", ["x"]), tmp_path / "out") == 2
    assert "another data_prep job is writing there" in capsys.readouterr().err


def test_input_and_output_may_be_one_folder(model, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [sentence(1)])
    assert tokenize(model, "jsonl", tmp_path, tmp_path) == 0
    assert tokenize(model, "jsonl", tmp_path, tmp_path) == 0  # neither its rejects nor its manifest became an input
    assert texts_of(model, tmp_path) == [sentence(1)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--input", "nowhere/*.jsonl"], "--input nowhere/*.jsonl matches no file"),
        (["--text-key", ","], "--text-key ',' names no key"),
        (["--split-on", "x"], "--split-on 'x' cuts plain text"),
        (["--source", "text", "--split-on", "("], "not a regular expression"),
        (["--source", "text", "--text-key", "a"], "--text-key 'a' names a key of JSON records"),
        (["--tokenizer", "nowhere.model"], "--tokenizer nowhere.model does not exist"),
        (["--max-reject-fraction", "2"], "2 is not a fraction from 0 to 1"),
        (["--workers", "0"], "0 is not a whole number of at least 1"),
    ],
)
def test_mistakes_are_told_in_one_sentence(model, tmp_path, capsys, words, message):
    assert tokenize(model, "jsonl", write_jsonl(tmp_path / "a.jsonl", ["x"]), tmp_path / "out", *words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_damage_is_noticed_when_a_dataset_is_read(model, tmp_path):
    assert tokenize(model, "jsonl", write_jsonl(tmp_path / "a.jsonl", [sentence(1)]), tmp_path) == 0
    path = tmp_path / "documents.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match="its manifest says"):
        read_manifest(tmp_path / "documents")
    with pytest.raises(DataError, match="its index counts"):
        IndexedDataset(tmp_path / "documents")
