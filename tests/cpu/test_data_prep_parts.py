"""`tokenize` over many files: parts, processes, arrays, and jobs that are killed, resumed or asked for something else."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data_prep import workers
from data_prep.cli import main
from data_prep.indexed_dataset import IndexedDataset
from data_prep.manifest import manifest_path, read_manifest, sha256_file
from data_prep.publish import Staging, shared_folder
from data_prep.tokenizers import load
from hybrid_megatron.errors import DataError

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A byte-level tokenizer without merges: an id a byte, then BOS 256 and EOS 257."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    folder = tmp_path_factory.mktemp("bytes")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    return folder


def write_shards(folder: Path, count: int = 5, documents: int = 40) -> Path:
    """`count` files, the third of which has a malformed line."""
    folder.mkdir()
    for shard in range(count):
        lines = [json.dumps({"text": f"document {number} of shard {shard} " + "é" * (number % 7)}) for number in range(documents)]
        lines[3:3] = ["{"] if shard == 2 else []
        (folder / f"shard_{shard}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def words(model: Path, inputs, output: Path, *more: str) -> list[str]:
    start = ["tokenize", "--source", "jsonl", "--tokenizer", str(model), "--max-reject-fraction", "0.05", "--workers", "1"]
    return [*start, "--input", str(inputs), "--output", str(output), *more]


def tokenize(model: Path, inputs, output: Path, *more: str) -> int:
    try:
        return main(words(model, inputs, output, *more))
    except SystemExit as leaving:
        return int(leaving.code or 0)


def files_of(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): sha256_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def texts_of(model: Path, prefix: Path) -> list[str]:
    tokenizer, dataset = load(model), IndexedDataset(prefix)
    return [tokenizer.decode(dataset[index][1:-1].tolist()) for index in range(len(dataset))]


def test_parts_are_datasets_and_join_in_order(model, tmp_path):
    shards = write_shards(tmp_path / "in")
    assert tokenize(model, shards, tmp_path / "out", "--keep-parts") == 0
    parts = tmp_path / "out" / "parts"
    prefixes = [parts / f"{index:05}-shard_{index}" for index in range(5)]
    expected = [f"document {number} of shard {shard} " + "é" * (number % 7) for shard in range(5) for number in range(40)]
    assert texts_of(model, tmp_path / "out" / "documents") == expected
    assert [text for prefix in prefixes for text in texts_of(model, prefix)] == expected
    whole, manifests = read_manifest(tmp_path / "out" / "documents"), [read_manifest(prefix) for prefix in prefixes]
    assert whole.tokens == sum(part.tokens for part in manifests)
    assert whole.source["inputs"] == [entry for part in manifests for entry in part.source["inputs"]]
    assert whole.rejected == manifests[2].rejected == {"count": 1, "by_reason": {"bad_json": 1}}
    assert (tmp_path / "out" / "rejects.jsonl").read_bytes() == (parts / "00002-shard_2.rejects.jsonl").read_bytes()
    from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset

    theirs = MegatronDataset(str(tmp_path / "out" / "documents"))
    assert np.array_equal(
        np.concatenate([theirs[index] for index in range(len(theirs))]), IndexedDataset(tmp_path / "out" / "documents").tokens
    )
    assert tokenize(model, shards, tmp_path / "out") == 0 and not parts.exists()  # nothing asked to keep them any more


def test_one_whole_file_gives_the_bytes_of_its_parts(model, tmp_path):
    shards = write_shards(tmp_path / "in")
    together = tmp_path / "all.jsonl"
    together.write_bytes(b"".join(path.read_bytes() for path in sorted(shards.iterdir())))
    assert tokenize(model, shards, tmp_path / "parts") == 0 and tokenize(model, together, tmp_path / "one") == 0
    for suffix in ("bin", "idx"):
        assert sha256_file(tmp_path / "parts" / f"documents.{suffix}") == sha256_file(tmp_path / "one" / f"documents.{suffix}")


def test_processes_and_threads_change_no_byte(model, tmp_path, capsys):
    shards = write_shards(tmp_path / "in")
    assert tokenize(model, shards, tmp_path / "one") == 0
    assert tokenize(model, shards, tmp_path / "two", "--processes", "2", "--workers", "4", "--json") == 0
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    manifest = read_manifest(tmp_path / "two" / "documents")
    assert (summary["documents"], summary["tokens"], summary["parts"], summary["parts_made"]) == (200, manifest.tokens, 5, 5)
    assert summary["rejected"] == {"bad_json": 1} and summary["bytes_read"] == sum(path.stat().st_size for path in shards.iterdir())


def test_an_array_makes_the_parts_and_the_plain_command_joins_them(model, tmp_path, capsys):
    shards = write_shards(tmp_path / "in")
    assert tokenize(model, shards, tmp_path / "one") == 0
    for index in (2, 0, 1, 0):
        assert tokenize(model, shards, tmp_path / "out", "--shard-index", str(index), "--num-shards", "3") == 0
    assert "already complete" in capsys.readouterr().out
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "parts").iterdir()}
    assert len(made) == 5 * 4 + 1 and not (tmp_path / "out" / "documents.bin").exists()
    assert tokenize(model, shards, tmp_path / "out", "--shard-index", "9", "--num-shards", "10") == 0  # more jobs than files
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "parts").iterdir()} == made
    assert tokenize(model, shards, tmp_path / "out", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["parts_made"] == 0
    assert files_of(tmp_path / "out") == files_of(tmp_path / "one")
    assert tokenize(model, shards, tmp_path / "out", "--shard-index", "0", "--num-shards", "3") == 0
    assert "already complete" in capsys.readouterr().out


def test_jobs_of_an_array_do_not_mix_plans(model, tmp_path, capsys):
    shards = write_shards(tmp_path / "in")
    first = ("--shard-index", "0", "--num-shards", "2")
    assert tokenize(model, shards, tmp_path / "out", *first) == 0
    before = files_of(tmp_path / "out")
    second = ("--shard-index", "1", "--num-shards", "2")
    assert tokenize(model, shards, tmp_path / "out", *second, "--no-eos") == 2
    assert "differs in adds_eos True -> False; remove" in capsys.readouterr().err
    (shards / "shard_9.jsonl").write_text('{"text": "late"}\n')
    assert tokenize(model, shards, tmp_path / "out", *second) == 2
    assert "shards.00005-shard_9" in capsys.readouterr().err
    assert tokenize(model, shards, tmp_path / "out", *second, "--overwrite") == 2
    assert tokenize(model, shards, tmp_path / "out", "--min-tokens", "3") == 2
    assert files_of(tmp_path / "out") == before
    with shared_folder(tmp_path / "out"):  # a job of the array is running
        assert tokenize(model, shards, tmp_path / "out", "--overwrite") == 2
        assert "another data_prep job is writing there" in capsys.readouterr().err
    assert tokenize(model, shards, tmp_path / "out", "--overwrite") == 0
    assert read_manifest(tmp_path / "out" / "documents").documents == 201


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--shard-index", "0"], "belong together"),
        (["--shard-index", "3", "--num-shards", "3"], "--shard-index 3 is not below --num-shards 3"),
        (["--where", "text", "is", "x"], "is is no comparison"),
    ],
)
def test_mistakes_are_told_in_one_sentence(model, tmp_path, capsys, more, message):
    assert tokenize(model, write_shards(tmp_path / "in"), tmp_path / "out", *more) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def stop_after(model: Path, shards: Path, output: Path, parts: int, monkeypatch) -> None:
    """Run until so many parts are finished, then fail as a full disk does."""
    made = []

    def make_part(*arguments):
        if len(made) == parts:
            raise DataError("stopped here")
        made.append(workers_make_part(*arguments))

    workers_make_part = workers.make_part
    with monkeypatch.context() as patch:
        patch.setattr(workers, "make_part", make_part)
        assert tokenize(model, shards, output) == 2


def test_finished_parts_are_used_again_and_changed_input_is_not(model, tmp_path, capsys, monkeypatch):
    shards = write_shards(tmp_path / "in")
    stop_after(model, shards, tmp_path / "out", 3, monkeypatch)
    os.utime(shards / "shard_0.jsonl")  # touched, but the same
    (shards / "shard_1.jsonl").write_text('{"text": "mended"}\n')
    (tmp_path / "out" / "parts" / "00002-shard_2.bin").unlink()  # as a job leaves it that was killed while joining
    assert tokenize(model, shards, tmp_path / "out", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["parts_made"] == 4
    assert tokenize(model, shards, tmp_path / "fresh") == 0
    for suffix in ("bin", "idx"):
        assert sha256_file(tmp_path / "out" / f"documents.{suffix}") == sha256_file(tmp_path / "fresh" / f"documents.{suffix}")


def test_renamed_files_and_other_options_are_not_mixed_with_finished_parts(model, tmp_path, capsys, monkeypatch):
    shards = write_shards(tmp_path / "in")
    stop_after(model, shards, tmp_path / "out", 2, monkeypatch)
    assert tokenize(model, shards, tmp_path / "out", "--max-tokens", "30") == 2
    assert "options.max_tokens None -> 30; add --overwrite to begin anew" in capsys.readouterr().err
    (shards / "shard_1.jsonl").rename(shards / "shard_7.jsonl")
    assert tokenize(model, shards, tmp_path / "out") == 2
    assert "differs in shards.00001-shard_1" in capsys.readouterr().err
    (shards / "shard_7.jsonl").rename(shards / "shard_1.jsonl")
    moved = shards.rename(tmp_path / "elsewhere")  # folders do not count
    assert tokenize(model, moved, tmp_path / "out") == 0
    assert tokenize(model, moved, tmp_path / "fresh") == 0
    assert sha256_file(tmp_path / "out" / "documents.bin") == sha256_file(tmp_path / "fresh" / "documents.bin")


def test_a_damaged_part_is_noticed_when_parts_are_joined(model, tmp_path, capsys):
    shards = write_shards(tmp_path / "in")
    assert tokenize(model, shards, tmp_path / "out", "--shard-index", "0", "--num-shards", "1") == 0
    path = tmp_path / "out" / "parts" / "00001-shard_1.bin"
    path.write_bytes(bytes(path.stat().st_size))
    assert tokenize(model, shards, tmp_path / "out") == 2
    assert f"{path} is damaged" in capsys.readouterr().err
    path.unlink()
    assert tokenize(model, shards, tmp_path / "out") == 0 and tokenize(model, shards, tmp_path / "fresh") == 0
    assert files_of(tmp_path / "out") == files_of(tmp_path / "fresh")


def test_rejects_of_all_parts_count_against_the_limit(model, tmp_path, capsys):
    shards = write_shards(tmp_path / "in")  # one of 201 records
    assert tokenize(model, shards, tmp_path / "out", "--max-reject-fraction", "0.004") == 2
    assert "1 of 201 records are rejected" in capsys.readouterr().err
    assert tokenize(model, shards, tmp_path / "out", "--max-reject-fraction", "0.005", "--json") == 0  # more than in its own part
    assert json.loads(capsys.readouterr().out)["parts_made"] == 0
    assert tokenize(model, shards, tmp_path / "array", "--shard-index", "2", "--num-shards", "5", "--max-reject-fraction", "0.02") == 2
    assert "shard_2.jsonl, line 4: bad_json" in (message := capsys.readouterr().err) and "parts/*.rejects.jsonl" in message


def test_lengths_drop_and_count(model, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * length}) + "\n" for length in (5, 8, 9, 10, 20)))
    assert tokenize(model, path, tmp_path / "out", "--min-tokens", "8", "--max-tokens", "10") == 0
    assert texts_of(model, tmp_path / "out" / "documents") == ["x" * length for length in (8, 9, 10)]
    assert read_manifest(tmp_path / "out" / "documents").dropped == {"too_short": 1, "too_long": 1, "blank_lines": 0}
    assert tokenize(model, path, tmp_path / "whole", "--whole-documents", "10") == 0  # with BOS and EOS at least 11
    assert texts_of(model, tmp_path / "whole" / "documents") == ["x" * length for length in (9, 10, 20)]


def test_files_of_one_name_are_different_shards(model, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard.jsonl").write_text(json.dumps({"text": name}) + "\n")
    assert tokenize(model, tmp_path / "*" / "shard.jsonl", tmp_path / "out") == 0
    assert texts_of(model, tmp_path / "out" / "documents") == ["a", "b"]


STRANGERS = {
    "a file in parts/": ("parts/notes.txt", False),
    "a folder in parts/": ("parts/sub/model.pt", False),
    "the input in parts/": ("parts/own.jsonl", True),
    "rejects without a dataset": ("rejects.jsonl", False),
    "the input is rejects": ("rejects.jsonl", True),
}


@pytest.mark.parametrize("name, is_input", STRANGERS.values(), ids=STRANGERS)
def test_what_tokenize_did_not_make_stays(model, tmp_path, capsys, name, is_input):
    output, shards = tmp_path / "out", write_shards(tmp_path / "raw", 1)
    (output / name).parent.mkdir(parents=True)
    (output / name).write_text('{"text": "the only copy"}\n')
    assert tokenize(model, output / name if is_input else shards, output) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ") and "choose another --output" in said
    assert (output / name).read_text() == '{"text": "the only copy"}\n' and not list(output.glob("documents*"))


def test_books_of_a_folder_are_one_part(model, tmp_path):
    (tmp_path / "books").mkdir()
    for number in range(30):
        (tmp_path / "books" / f"{number:02}.txt").write_text(f"book {number}")
    assert tokenize(model, tmp_path / "books", tmp_path / "out", "--source", "pg19", "--keep-parts") == 0
    assert texts_of(model, tmp_path / "out" / "documents") == [f"book {number}" for number in range(30)]
    assert len(list((tmp_path / "out" / "parts").glob("*.bin"))) == 1


def test_standard_input(model, tmp_path):
    source = write_shards(tmp_path / "in", count=1) / "shard_0.jsonl"
    command = [sys.executable, "-m", "data_prep", *words(model, "-", tmp_path / "out")]
    assert subprocess.run(command, cwd=REPOSITORY, stdin=source.open("rb")).returncode == 0
    assert tokenize(model, source, tmp_path / "fresh") == 0
    assert sha256_file(tmp_path / "out" / "documents.bin") == sha256_file(tmp_path / "fresh" / "documents.bin")
    (entry,) = read_manifest(tmp_path / "out" / "documents").source["inputs"]
    assert (entry["path"], entry["bytes"], entry["sha256"]) == ("-", source.stat().st_size, sha256_file(source))
    again = subprocess.run(
        command, cwd=REPOSITORY, stdin=source.open("rb"), stderr=subprocess.PIPE, text=True
    )  # nothing to compare it with
    assert again.returncode == 2 and "another dataset is finished there and differs in source.inputs" in again.stderr


def start(model: Path, shards: Path, output: Path, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "data_prep", *words(model, shards, output, *more)]
    return subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)


def children(process: subprocess.Popen) -> list[int]:
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [child for child in map(int, listed) if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def wait_for(condition, process: subprocess.Popen) -> None:
    while not condition():
        assert process.poll() is None, "the job was over before it could be killed"
        time.sleep(0.002)


def test_a_killed_process_ends_the_job_and_names_its_file(model, tmp_path):
    shards = write_shards(tmp_path / "in", count=3, documents=60_000)
    process = start(model, shards, tmp_path / "out", "--processes", "2")
    wait_for(lambda: list((tmp_path / "out" / "parts").glob(".*.partial/*.bin")), process)
    os.kill(children(process)[-1], signal.SIGKILL)
    message = process.communicate()[1]
    assert process.returncode == 2 and "Traceback" not in message
    line = message.strip().splitlines()[-1]
    assert line.startswith(f"error: the process that tokenized {shards}/shard_") and "was killed by SIGKILL" in line
    assert not (tmp_path / "out" / "documents.bin").exists()


def test_jobs_killed_at_random_moments_end_with_the_same_bytes(model, tmp_path):
    shards = write_shards(tmp_path / "in", count=6, documents=6_000)
    assert tokenize(model, shards, tmp_path / "fresh") == 0
    generator = random.Random(0)
    killed = 0
    for attempt in range(4):
        process = start(model, shards, tmp_path / "out", "--processes", str(1 + attempt % 2))
        wait_for((tmp_path / "out").exists, process)
        time.sleep(generator.uniform(0.2, 1.0) * attempt * 0.3)  # the first dies at once: a quick machine is done within a second
        process.kill()
        killed += process.wait() == -signal.SIGKILL
        process.stderr.close()
    assert killed
    deadline = time.monotonic() + 30
    while tokenize(model, shards, tmp_path / "out") != 0:  # a process of the last job may live until it notices
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "fresh")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(files_of(tmp_path / "fresh"))


def test_a_staging_folder_of_one_name_is_one_jobs(tmp_path):
    with Staging(tmp_path, "a", beside_others=True) as first, Staging(tmp_path, "b", beside_others=True):
        with pytest.raises(DataError, match="another data_prep job is writing there"):
            with Staging(tmp_path, "a", beside_others=True):
                pass
        first.path("kept").write_text("x")
    (tmp_path / ".a.partial").mkdir()
    (tmp_path / ".a.partial" / "left").write_text("x")
    with Staging(tmp_path, "a", beside_others=True) as again:
        assert again.was_interrupted and not list(again.folder.iterdir())
    shutil.rmtree(tmp_path / ".a.partial", ignore_errors=True)
    assert list(tmp_path.iterdir()) == []


def test_whatever_goes_in_comes_out_through_megatron(model, tmp_path_factory):
    hypothesis = pytest.importorskip("hypothesis")
    from hypothesis import strategies
    from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset

    tokenizer = load(model)
    text = strategies.text(strategies.characters(exclude_categories=("Cs",)), max_size=40)

    @hypothesis.settings(max_examples=25, deadline=None, database=None, derandomize=True)
    @hypothesis.given(strategies.lists(strategies.lists(text, max_size=6), min_size=1, max_size=4))
    def round_trip(shards: list[list[str]]) -> None:
        folder = tmp_path_factory.mktemp("property")
        for number, documents in enumerate(shards):
            lines = (json.dumps({"text": document}, ensure_ascii=number % 2 == 0) + "\n" for document in documents)
            (folder / f"{number}.jsonl").write_text("".join(lines), "utf-8", newline="\n")
        expected = [document for documents in shards for document in documents if document.strip()]
        code = tokenize(model, folder, folder / "out", "--max-reject-fraction", "1")
        assert code == (0 if expected else 2)
        if expected:
            dataset = MegatronDataset(str(folder / "out" / "documents"))
            assert [tokenizer.decode(dataset[index][1:-1].tolist()) for index in range(len(dataset))] == expected
            assert dataset.document_indices.tolist() == list(range(len(expected) + 1))
            manifest = read_manifest(folder / "out" / "documents")
            assert manifest.rejected["count"] == sum(len(documents) for documents in shards) - len(expected)
        else:
            assert not manifest_path(folder / "out" / "documents").exists()

    round_trip()
