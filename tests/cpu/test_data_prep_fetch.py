"""`fetch` against a hub on this machine: the choice of shards, pages, resuming, damage, refusals and what a folder may become."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from data_prep import download as download_module
from data_prep.cli import main
from data_prep.corpora import CORPORA
from data_prep.fetch import NAME, PARTIAL, Request, plan
from data_prep.hub import RemoteFile
from data_prep.shards import choose, shards_of
from data_prep.sources import find_files
from hybrid_megatron.errors import DataError
from hybrid_megatron.quantities import human_count, parse_count
from tests.cpu.hub_server import COMMIT, FakeHub, sha256

DCLM = CORPORA["dclm"]
SHARDS = [f"global-shard_0{number % 3}_of_10/local-shard_{number}_of_10/shard_{number:08d}_processed.jsonl.zst" for number in range(8)]
ALL = "20.8K"  # eight shards of 5,000 bytes at 0.52 tokens a byte


def content(number: int, size: int = 5_000) -> bytes:
    return random.Random(number).randbytes(size)


@pytest.fixture(scope="module")
def client():
    """huggingface_hub's client, without a proxy; making one takes a while, so all tests share it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1,localhost")
        huggingface_hub.close_session()
        yield
        huggingface_hub.close_session()


@pytest.fixture
def hub(client, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(download_module, "FIRST_WAIT_SECONDS", 0.01)
    files = {path: content(number) for number, path in enumerate(SHARDS)} | {"README.md": b"# A card\n", ".gitattributes": b"*.zst\n"}
    fake = FakeHub(DCLM.repository, files, {"main": COMMIT, DCLM.revision: DCLM.revision})
    with fake.serving():
        yield fake


def fetch(hub: FakeHub, output: Path, *words: str, tokens: str = ALL, margin: str = "0") -> int:
    try:
        return main(["fetch", "dclm", "--tokens", tokens, "--margin", margin, "--output", str(output), "--endpoint", hub.url, *words])
    except SystemExit as ended:
        return ended.code


def manifest(output: Path) -> dict:
    return json.loads((output / NAME).read_text())


def on_disk(output: Path) -> dict[str, bytes]:
    return {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*") if path.is_file() and path.name != NAME}


def test_numbers_of_tokens():
    for word, value in {"50B": 50 * 10**9, "1.5M": 1_500_000, "4096": 4096, "5b": 5 * 10**9, "1_000k": 10**6, "2T": 2 * 10**12}.items():
        assert parse_count(word) == value
    for word in ("", "B", "-5B", "1.5", "1e9", "50 B", "0.0001K", "5BB", "nan", "٥"):
        with pytest.raises(ValueError, match="not a whole number"):
            parse_count(word)
    assert [human_count(value) for value in (512, 20_800, 999_499, 52_500_000_000, 4 * 10**12)] == ["512", "20.8K", "999K", "52.5B", "4T"]


def test_a_larger_budget_extends_the_choice_and_another_seed_changes_it():
    files = [RemoteFile(f"s{number}.jsonl", 1_000 + number, None, "") for number in range(40)]
    shards = shards_of(files, ["*.jsonl"], {".jsonl": 0.5})
    names = {}
    for budget in range(500, 20_000, 700):
        chosen = choose(shards, 3, budget, 0.1)
        names[budget] = [shard.file.path for shard in chosen]
        assert sum(shard.tokens for shard in chosen[:-1]) < budget * 1.1 <= sum(shard.tokens for shard in chosen) or len(chosen) == 40
        assert chosen == choose(list(reversed(shards)), 3, budget, 0.1), "the hub's order does not count"
    lists = list(names.values())
    assert all(after[: len(before)] == before for before, after in zip(lists, lists[1:], strict=False))
    assert sorted(lists[-1]) != lists[-1]
    assert [shard.file.path for shard in choose(shards, 4, 5_000, 0.1)] != [shard.file.path for shard in choose(shards, 3, 5_000, 0.1)]
    assert lists[0] == ["s27.jsonl", "s19.jsonl"], "the order is the same on every machine, for ever"
    with pytest.raises(DataError, match=r"--tokens 30K is more than the corpus has: it holds about 20\.4K tokens in 40 shards"):
        choose(shards, 3, 30_000, 0)
    with pytest.raises(DataError, match="say so with --tokens-per-byte"):
        shards_of(files, ["*"], {".parquet": 0.5})


def test_each_corpus_takes_its_shards_and_nothing_else():
    shard = {
        "dclm": SHARDS[0],
        "longwanjuan": "en/Book/holistic/part-0.jsonl.gz",
        "fineweb_edu": "data/CC-MAIN-2024-10/000_00000.parquet",
        "pg19": "data/train-00000-of-00023-5263dc4323e881d2.parquet",
    }
    others = ["README.md", ".gitattributes", "sample/10BT/000_00000.parquet", "data/test-00000-of-00001-29a571947c0b5ccc.parquet"]
    assert set(shard) == set(CORPORA)
    for name, corpus in CORPORA.items():
        files = [RemoteFile(path, 100, None, "") for path in [shard[name], *others]]
        [only] = shards_of(files, corpus.patterns, corpus.tokens_per_byte)
        assert only.file.path == shard[name] and 24 <= only.tokens <= 65


def test_pages_commit_and_bytes(hub, tmp_path, capsys):
    hub.in_git = {SHARDS[3]}
    assert fetch(hub, tmp_path / "out") == 0
    assert on_disk(tmp_path / "out") == {path: hub.files[path] for path in SHARDS}
    record = manifest(tmp_path / "out")
    assert record["revision"] == DCLM.revision and record["repository"] == DCLM.repository and record["seed"] == 0
    assert {entry["path"]: (entry["size"], entry["sha256"], entry["state"]) for entry in record["files"]} == {
        path: (5_000, sha256(hub.files[path]), "complete") for path in SHARDS
    }
    assert record["tokens"] == record["estimated_tokens"] == 20_800 and record["bytes"] == 40_000
    assert sum("/tree/" in path for path, _ in hub.asked) == 4  # ten files, three a page
    said = capsys.readouterr().out
    assert "8 of 8 shards, 40.0 kB, about 20.8K tokens" in said and DCLM.revision[:12] in said and "CC-BY-4.0" in said
    tokens = {path.split("/")[1]: token for path, token in hub.tokens}
    assert tokens == {"api": "Bearer hf_secret", "datasets": "Bearer hf_secret", "cdn": None}  # the token stays with the hub
    assert [str(path) for path in find_files("jsonl", [str(tmp_path / "out")])] == sorted(str(tmp_path / "out" / path) for path in SHARDS)


def test_run_again_it_brings_what_is_missing_or_damaged_and_needs_no_hub_otherwise(hub, tmp_path, capsys):
    output = tmp_path / "out"
    assert fetch(hub, output) == 0
    (output / SHARDS[1]).unlink()
    (output / SHARDS[2]).write_bytes(content(99))  # the right size
    (output / SHARDS[4]).write_bytes(b"short")
    hub.asked.clear()
    assert fetch(hub, output) == 0
    assert on_disk(output) == {path: hub.files[path] for path in SHARDS}
    assert {path for path in SHARDS if hub.ranges(path)} == {SHARDS[1], SHARDS[2], SHARDS[4]}
    assert not any(path.startswith("/api") for path, _ in hub.asked)
    hub.asked.clear()
    capsys.readouterr()
    assert fetch(hub, output) == 0
    assert hub.asked == [] and "already complete, nothing to do" in capsys.readouterr().out


def test_list_downloads_nothing_and_speaks_json(hub, tmp_path, capsys):
    words = ["fetch", "dclm", "--tokens", "10K", "--margin", "0", "--list", "--endpoint", hub.url]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said.startswith("dclm: 4 of 8 shards") and said.count("5.0 kB") == 4 and said.count("2.6K tokens") == 4
    assert main([*words, "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)
    assert [entry["path"] in said for entry in chosen["files"]] == [True] * 4 and chosen["bytes"] == 20_000
    assert main([*words, "--json", "--seed", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] != chosen["files"]
    assert not any("/resolve/" in path for path, _ in hub.asked)
    with pytest.raises(SystemExit, match="2"):
        main([word for word in words if word != "--list"])
    assert "needs --output DIR" in capsys.readouterr().err


def test_a_folder_is_extended_and_nothing_else(hub, tmp_path, capsys):
    output = tmp_path / "out"
    assert fetch(hub, output, tokens="5K") == 0
    first = [entry["path"] for entry in manifest(output)["files"]]
    hub.asked.clear()
    assert fetch(hub, output, tokens="10K", margin="0.05") == 0
    after = [entry["path"] for entry in manifest(output)["files"]]
    assert len(first) == 2 and len(after) == 5 and after[:2] == first
    assert not any(hub.ranges(path) for path in first), "what was there is kept"
    hub.revisions["v2"] = "f" * 40
    kept = on_disk(output), manifest(output)
    for words, message in (
        (["--seed", "1"], "seed 0 -> 1"),
        (["--revision", "v2"], f"revision {DCLM.revision} -> {'f' * 40}"),
        (["--pattern", "*_of_10/*.jsonl.zst"], "patterns"),
        (["--tokens", "5K"], "holds a fetch of 5 shards, and what is asked now takes 3"),
        (["--tokens", "5B"], "is more than the corpus has"),
    ):
        assert fetch(hub, output, *words, tokens="10K", margin="0.05") == 2
        said = capsys.readouterr().err
        assert message in said and said.startswith("error: ") and said.count("\n") == 1
        assert (on_disk(output), manifest(output)) == kept
    (output / NAME).write_text("{")
    assert fetch(hub, output) == 2 and "is damaged; delete it" in capsys.readouterr().err


def test_a_branch_is_resolved_once(hub, tmp_path):
    assert fetch(hub, tmp_path, "--revision", "main", tokens="5K") == 0
    hub.revisions["main"], hub.revisions["old"] = "e" * 40, COMMIT
    assert fetch(hub, tmp_path, "--revision", "main") == 0
    assert manifest(tmp_path)["revision"] == COMMIT
    assert {path.split("/resolve/")[1].split("/")[0] for path, _ in hub.asked if "/resolve/" in path} == {COMMIT}


@pytest.mark.parametrize(
    ("faults", "ranges"),
    [
        ([("cut", 2_000), ("cut", 1_000)], [None, "bytes=2000-", "bytes=3000-"]),
        ([("status", 503, {}), ("status", 429, {"Retry-After": "0"}), ("status", 500, {})], [None] * 4),
        ([("cut", 2_000), ("whole",)], [None, "bytes=2000-"]),  # a server that does not resume
        ([("cut", 2_000), ("shifted",)], [None, "bytes=2000-", "bytes=2000-"]),
        ([("corrupt",), ("corrupt",)], [None] * 3),
        ([("cut", 0)] * 5, [None] * 6),
        ([("cut", 500)] * 8, [None, *(f"bytes={500 * part}-" for part in range(1, 9))]),  # slow but steady is no failure
    ],
)
def test_failures_that_pass(hub, tmp_path, faults, ranges):
    hub.faults[SHARDS[5]] = list(faults)
    assert fetch(hub, tmp_path / "out") == 0
    assert hub.ranges(SHARDS[5]) == ranges
    assert on_disk(tmp_path / "out") == {path: hub.files[path] for path in SHARDS}


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ([("status", 503, {})] * 6, "could not be fetched from URL (status 503) in 6 attempts; run the same command again"),
        ([("cut", 1_000), *[("cut", 0)] * 6], "in 6 attempts; run the same command again"),
        ([("corrupt",)] * 3, "came with wrong bytes 3 times"),
        ([("status", 404, {"X-Error-Code": "EntryNotFound"})], "status 404"),
    ],
)
def test_failures_that_stay_keep_what_came(hub, tmp_path, capsys, faults, message):
    hub.faults[SHARDS[5]] = list(faults)
    output = tmp_path / "out"
    assert fetch(hub, output, "--workers", "1") == 2
    said = capsys.readouterr().err
    assert message.replace("URL", hub.url) in said and said.count("\n") == 1
    states = {entry["path"]: entry["state"] for entry in manifest(output)["files"]}
    assert states[SHARDS[5]] == "missing" and not (output / SHARDS[5]).exists()
    assert all((output / path).read_bytes() == hub.files[path] for path, state in states.items() if state == "complete")
    hub.asked.clear()
    assert fetch(hub, output) == 0 and hub.ranges(SHARDS[5]) == ["bytes=1000-" if faults[0][0] == "cut" else None]
    assert on_disk(output) == {path: hub.files[path] for path in SHARDS}


def test_a_damaged_half_file_is_begun_anew(hub, tmp_path):
    output = tmp_path / "out"
    for path, half in ((SHARDS[0], content(98, 2_000)), (SHARDS[1], content(97, 5_000)), (SHARDS[2], content(96, 6_000))):
        (output / PARTIAL / path).parent.mkdir(parents=True)
        (output / PARTIAL / path).write_bytes(half)
    assert fetch(hub, output) == 0
    assert hub.ranges(SHARDS[0]) == ["bytes=2000-", None] and hub.ranges(SHARDS[1]) == hub.ranges(SHARDS[2]) == [None]
    assert on_disk(output) == {path: hub.files[path] for path in SHARDS}


@pytest.mark.parametrize(
    ("where", "refusal", "message"),
    [
        ("refusal", (401, {"X-Error-Code": "GatedRepo"}), "is gated: accept its terms at URL/datasets/mlfoundations/dclm-baseline-1.0"),
        ("refusal", (403, {"X-Error-Code": "GatedRepo"}), "is gated: accept its terms"),
        ("closed", (403, {"X-Error-Code": "GatedRepo"}), "is gated: accept its terms"),
        ("closed", (403, {}), "refuses access to mlfoundations/dclm-baseline-1.0 (status 403)"),
        ("refusal", (401, {"X-Error-Code": "RepoNotFound"}), "has no data set mlfoundations/dclm-baseline-1.0 that you may read"),
        ("refusal", (401, {}), "(status 401); check your rights there"),
        ("refusal", (200, {}), "does not answer as a hub does"),
    ],
)
def test_refusals(hub, tmp_path, capsys, where, refusal, message):
    setattr(hub, where, refusal)
    assert fetch(hub, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert message.replace("URL", hub.url) in said and said.count("\n") == 1 and "hf_secret" not in said
    assert (tmp_path / "out").exists() == (where == "closed")


def test_mistakes_in_what_is_asked(hub, tmp_path, capsys, monkeypatch):
    for words, message in (
        (["--revision", "v9"], "mlfoundations/dclm-baseline-1.0 has no revision v9; see"),
        (["--repository", "nobody/nothing"], "has no data set nobody/nothing that you may read"),
        (["--repository", "a/b/c"], "is no address of a data set"),
        (["--pattern", "*.csv"], "none of the repository's 10 files matches *.csv"),
        (["--pattern", "*.md"], "say so with --tokens-per-byte"),
        (["--endpoint", "http://127.0.0.1:9"], "http://127.0.0.1:9 cannot be reached"),
        (["--endpoint", "nonsense"], "nonsense cannot be reached"),
        (["--tokens", "20.9K"], "is more than the corpus has"),
        (["--tokens", "5 apples"], "5 apples is not a whole number of at least 1"),
    ):
        assert fetch(hub, tmp_path / "out", *words) == 2
        said = capsys.readouterr().err
        assert message in said and not (tmp_path / "out").exists()
    assert main(["fetch", "dclm", "--tokens", "9", "--list", "--pattern", "*.md", "--tokens-per-byte", "1", "--endpoint", hub.url]) == 0
    with pytest.raises(SystemExit, match="2"):
        main(["fetch", "longwanjuan", "--tokens", "5B", "--list", "--endpoint", hub.url])
    assert "published at https://opendatalab.com/OpenLMLab/LongWanjuan, and no mirror" in capsys.readouterr().err
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert fetch(hub, tmp_path / "out") == 2 and "HF_HUB_OFFLINE forbids" in capsys.readouterr().err


def test_a_path_that_leaves_its_folder_is_refused(hub, tmp_path, capsys):
    hub.files["global-shard_0/local-shard_0/../../../outside.jsonl.zst"] = b"x"
    assert fetch(hub, tmp_path / "out") == 2
    assert "would leave its folder" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_another_repository_is_taken_at_its_main(hub):
    hub.repository = "mirror/longwanjuan"
    hub.files = {"zh/book/a.jsonl": content(1), "README.md": b"x"}
    request = Request("longwanjuan", 1_000, repository="mirror/longwanjuan", endpoint=hub.url)
    chosen = plan(request)
    assert chosen["revision"] == COMMIT and chosen["asked_revision"] == "main" and chosen["estimated_tokens"] == 1_200


def test_the_disk(hub, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    assert fetch(hub, tmp_path / "file" / "out") == 2  # its parent is a file
    assert f"{tmp_path / 'file' / 'out'}: the output cannot be written (Not a directory)" in capsys.readouterr().err
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    hub.files[SHARDS[5]] = content(5, 60_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        assert fetch(hub, tmp_path / "out", tokens="49.4K") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{tmp_path / 'out'}: the output cannot be written (File too large); free some space" in said
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    assert fetch(hub, tmp_path / "out", tokens="49.4K") == 2
    assert "still to be fetched, and 10 B are free; free some space there" in capsys.readouterr().err
    monkeypatch.undo()
    assert fetch(hub, tmp_path / "out", tokens="49.4K") == 0 and on_disk(tmp_path / "out") == {path: hub.files[path] for path in SHARDS}


def test_interrupted_and_resumed_without_a_trace_in_the_hubs_cache(hub, tmp_path):
    output, home = tmp_path / "out", tmp_path / "home"
    for path in SHARDS:
        hub.faults[path] = [("slow", 2_000, 3.0)]
    words = ["fetch", "dclm", "--tokens", ALL, "--margin", "0", "--output", str(output), "--workers", "8"]
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    started = subprocess.Popen([sys.executable, "-m", "data_prep", *words], env=environment, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while sum(len(hub.ranges(path)) for path in SHARDS) < 8 and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.2)
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 130 and "Traceback" not in said
    assert {entry["state"] for entry in manifest(output)["files"]} == {"missing"} and not home.exists()
    assert fetch(hub, output) == 0
    assert all(hub.ranges(path) == [None, "bytes=2000-"] for path in SHARDS)
    assert on_disk(output) == {path: hub.files[path] for path in SHARDS}
