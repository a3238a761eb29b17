"""Sources: every layout and corpus as documents, filters, and input that is damaged or hostile."""

import bz2
import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest

from data_prep import compression, readers
from data_prep.inputs import shards_of
from data_prep.records import Record, Reject
from data_prep.sources import open_source
from hybrid_megatron.errors import DataError


def write_jsonl(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def texts(source) -> list[str]:
    return [record.text for record in source.records() if isinstance(record, Record)]


def rejects(source) -> list[tuple[int, str]]:
    return [(record.line, record.reason) for record in source.records() if isinstance(record, Reject)]


def test_corpora_know_where_their_text_is(tmp_path):
    import zstandard

    dclm = tmp_path / "shard_00000000_processed.jsonl.zst"
    dclm.write_bytes(zstandard.compress(b'{"text": "one", "url": "u"}\n'))
    assert texts(open_source("dclm", [str(tmp_path)])) == ["one"]
    (tmp_path / "book.jsonl.gz").write_bytes(gzip.compress(b'{"content": "two"}\n{"text": "three"}\n'))
    (tmp_path / "more.jsonl.bz2").write_bytes(bz2.compress(b'{"content": "four"}\n') + bz2.compress(b'{"content": "five"}\n'))
    assert texts(open_source("longwanjuan", [f"{tmp_path}/book.jsonl.gz", f"{tmp_path}/more.jsonl.bz2"])) == [
        "two",
        "three",
        "four",
        "five",
    ]
    (tmp_path / "10001.txt").write_text("A book.\n")
    assert texts(open_source("pg19", [str(tmp_path)])) == ["A book.\n"]


def test_a_list_of_inputs_and_standard_input(tmp_path, monkeypatch):
    first, second = (write_jsonl(tmp_path / f"{name}.jsonl", [{"text": name}]) for name in "ab")
    (tmp_path / "list").write_text(f"{second}\n\n{first}\n")
    assert texts(open_source("jsonl", [f"@{tmp_path / 'list'}"])) == ["b", "a"]
    with pytest.raises(DataError, match="the list of inputs cannot be read"):
        open_source("jsonl", ["@nowhere"])
    for content in (first.read_bytes(), gzip.compress(first.read_bytes())):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        source = open_source("jsonl", ["-"])
        assert texts(source) == ["a"] and source.describe()["inputs"][0]["bytes"] == len(content)
    with pytest.raises(DataError, match="comes alone"):
        open_source("jsonl", ["-", str(first)])


def test_where_and_language_keep_and_count(tmp_path):
    records = [
        {"text": "one", "score": 3, "meta": {"lang": "en"}, "language": "en", "language_score": 0.9},
        {"text": "two", "score": 1.5, "meta": {"lang": "fr"}, "language": "fr", "language_score": 0.99},
        {"text": "three", "score": 4, "meta": {"lang": "en"}, "language": "en", "language_score": 0.2},
        {"text": "four", "score": "high", "meta": 7},
    ]
    path = str(write_jsonl(tmp_path / "a.jsonl", records))

    def kept(*where: tuple[str, str, str], **language) -> list[str]:
        return texts(open_source("jsonl", [path], where=where, **language))

    assert kept(("score", ">=", "3")) == ["one", "three"]
    assert kept(("score", "<", "4"), ("meta.lang", "!=", "fr")) == ["one"]
    assert kept(("meta.lang", "in", "fr,de")) == ["two"]
    assert kept(("text", "contains", "o")) == ["one", "two", "four"]
    assert kept(("text", "matches", "^t")) == ["two", "three"]
    assert kept(language="en", language_field="language") == ["one", "three"]
    assert kept(language="en", language_field="language", min_language_score=0.5) == ["one"]
    assert kept(language="fr", language_field="meta.lang,language_score", min_language_score=0.5) == ["two"]
    source = open_source("jsonl", [path], where=[("score", ">=", "3")])
    assert rejects(source) == [(4, "missing_field")]
    assert source.filtered == {"score >= 3": 1} and source.describe()["filters"] == ["score >= 3"]
    with pytest.raises(DataError, match="~ is no comparison"):
        kept(("score", "~", "3"))
    with pytest.raises(DataError, match="add --language-field"):
        kept(language="en")
    with pytest.raises(DataError, match="belong to --language"):
        kept(min_language_score=0.5)
    scores = [{"text": str(score), "language_id_whole_page_fasttext": {"en": score}} for score in (0.5, 0.7)]
    path = str(write_jsonl(tmp_path / "b.jsonl", [*scores, {"text": "none", "language_id_whole_page_fasttext": {}}]))
    assert texts(open_source("dclm", [path], language="en", min_language_score=0.65)) == ["0.7"]


def test_a_line_without_end_is_rejected_without_being_held(tmp_path, monkeypatch):
    monkeypatch.setattr(compression, "CHUNK_BYTES", 1_000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n' + b"x" * 50_000 + b'\n{"text": "two"}\n' + b"y" * 2_001)
    with path.open("rb") as file:
        lines = list(compression.read_lines(iter(lambda: file.read(1_000), b""), longest=2_000))
    assert lines == [b'{"text": "one"}', None, b'{"text": "two"}', None]
    monkeypatch.setattr(readers, "LONGEST_LINE", 2_000)
    (tmp_path / "a.txt").write_bytes(b"z" * 2_001)
    assert rejects(open_source("text", [str(tmp_path / "a.txt")])) == [(1, "too_long")]


@pytest.mark.parametrize("line", [b'{"text": "%s"}', b'{"text": "%s'], ids=["white space", "no end"])
def test_a_line_of_200_megabytes(tmp_path, line):
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        first, _, last = line.partition(b"%s")
        file.write(first)
        for _ in range(200):
            file.write(b" " * 1_000_000)
        file.write(last + b'\n{"text": "after"}\n')
    found = list(open_source("jsonl", [str(path)]).records())
    assert isinstance(found[0], Reject) and found[0].reason == ("empty_text" if last else "bad_json") and len(found[0].detail) < 200
    assert found[1:] == [Record(str(path), 2, "after")]


@pytest.fixture
def parquet():
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    return pyarrow


def test_parquet_rows(parquet, tmp_path):
    strings = parquet.array([b"one", None, b"\xff", b" ", "dré".encode()], parquet.binary()).cast(parquet.string(), safe=False)
    struct = parquet.array([{"en": score} for score in (0.1, 0.2, 0.3, 0.4, 0.9)])
    table = parquet.table({"id": list("abcde"), "text": strings, "score": [1, 2, 3, 4, 5], "languages": struct})
    path = tmp_path / "train-00000.parquet"
    parquet.parquet.write_table(table, path, row_group_size=2)
    source = open_source("parquet", [str(tmp_path)])
    assert texts(source) == ["one", "dré"] and source.bytes_read == path.stat().st_size
    assert rejects(source) == [(2, "not_a_string"), (3, "invalid_utf8"), (4, "empty_text")]
    assert texts(open_source("fineweb_edu", [str(path)], where=[("score", ">", "4")])) == ["dré"]
    assert texts(open_source("fineweb_edu", [str(path)], language="en", min_language_score=0.5, language_field="languages")) == ["dré"]
    with pytest.raises(DataError, match="has no column body, only id, languages, score, text"):
        texts(open_source("parquet", [str(path)], text_key="body"))
    for content in (path.read_bytes()[:-10], path.read_bytes()[:40], b""):
        path.write_bytes(content)
        with pytest.raises(DataError, match="damaged or cut off"):
            texts(open_source("parquet", [str(path)]))


def write_tar(path: Path, members: list[tuple[str, bytes]], kind: str = "w") -> Path:
    with tarfile.open(path, kind) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_webdataset_members_are_grouped_by_key(tmp_path):
    members = [("a/1.txt", b"one"), ("a/1.jpg", b"\xff\xd8"), ("a/2.json", b'{"text": "two", "url": "u"}'), ("a/2.txt", b"caption")]
    members += [("__meta__/x.txt", b"no sample"), ("noextension", b"x"), ("a/3.cls", b"7"), ("a/4.seg.txt", b"four"), ("a/5.md", b"# five")]
    write_tar(tmp_path / "plain.tar", members)
    write_tar(tmp_path / "packed.tar.gz", members, "w:gz")
    for name in ("plain.tar", "packed.tar.gz"):
        source = open_source("webdataset", [str(tmp_path / name)])
        assert texts(source) == ["one", "two"] and rejects(source) == [(7, "missing_key"), (8, "missing_key"), (9, "missing_key")]
    path = str(tmp_path / "plain.tar")
    assert texts(open_source("webdataset", [path], text_key="txt")) == ["one", "caption"]
    assert texts(open_source("webdataset", [path], text_key="seg.txt,md")) == ["four", "# five"]
    assert texts(open_source("webdataset", [path], where=[("url", "==", "u")])) == ["two"]


def test_the_webdataset_library_writes_and_reads_the_same(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(5):
            writer.write({"__key__": f"sample{number:03}", "txt": f"text {number}", "json": {"number": number}})
    theirs = [sample["txt"].decode() for sample in webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False)]
    assert texts(open_source("webdataset", [str(tmp_path)])) == theirs == [f"text {number}" for number in range(5)]


def test_hostile_tar_members_are_rejected_and_nothing_is_unpacked(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    path = write_tar(tmp_path / "a.tar", [("../evil.txt", b"evil"), ("/tmp/evil.txt", b"evil"), ("1.txt", b"one"), ("1.txt", b"again")])
    with tarfile.open(path, "a") as archive:
        link = tarfile.TarInfo("2.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        broken = tarfile.TarInfo("3.json")
        archive.addfile(broken)
    source = open_source("webdataset", [str(path)])
    assert rejects(source) == [(1, "unsafe_name"), (2, "unsafe_name"), (5, "not_a_file"), (4, "duplicate_name"), (6, "bad_json")]
    assert texts(source) == [] and sorted(file.name for file in tmp_path.rglob("*")) == ["a.tar", "work"]


def test_a_cut_off_or_damaged_tar_stops_the_job(tmp_path):
    content = write_tar(tmp_path / "a.tar", [("1.txt", b"one" * 500), ("2.txt", b"two" * 500), ("3.txt", b"three")]).read_bytes()
    header = content.index(b"2.txt")
    broken = {"inside": content[:1_000], "between": content[:header], "damaged": content[:header] + b"??" + content[header + 2 :]}
    for name, damaged in broken.items():
        (tmp_path / "a.tar").write_bytes(damaged)
        with pytest.raises(DataError, match="cut off|damaged"):
            assert texts(open_source("webdataset", [str(tmp_path / "a.tar")])) == [], name


def test_books_share_shards_and_other_files_do_not():
    files = [Path(f"books/{number}.txt") for number in range(5)]
    grouped = shards_of(files, [40_000_000, 20_000_000, 10_000_000, 90_000_000, 1], grouped=True)
    assert [len(shard.files) for shard in grouped] == [2, 1, 1, 1]
    assert [shard.name for shard in grouped] == ["00000-0", "00001-2", "00002-3", "00003-4"]
    same = [Path("a/shard.jsonl.zst"), Path("b/shard.jsonl.zst"), Path("c/wörd .json")]
    assert [shard.name for shard in shards_of(same, [1, 1, 1], grouped=False)] == ["00000-shard", "00001-shard", "00002-w_rd_"]
