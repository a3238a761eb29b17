"""gigatoken against tiktoken: the same ids, the same bytes of a dataset, and one sentence where it fails."""

import json
import random
import sys
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import gigatoken_encoder
from data_prep.encoders import gigatoken_version
from data_prep.gigatoken_encoder import GigatokenTokenizer, with_encoder
from data_prep.manifest import sha256_file
from data_prep.tiktoken_tokenizers import MODELS, TiktokenTokenizer
from data_prep.tokenizer_base import EncodingFailed
from data_prep.tokenizers import load, load_encoder
from hybrid_megatron.errors import DataError
from tests.cpu.small_tokenizers import CODE, MIXED, TEXTS, of_words, small
from tests.cpu.token_files import run

pytestmark = pytest.mark.skipif(gigatoken_version() is None, reason="gigatoken is not installed (pip install gigatoken==0.10.0)")

WORDS = [
    "a",
    "aa",
    "aaaaaaa",
    "'s",
    "'LL",
    "ſ",
    "e\u0301",
    "é",
    "的",
    "🙂",
    "1",
    "23",
    "4567",
    " ",
    "  ",
    " " * 30,
    "\n",
    "\r\n",
    "\t",
    "\u3000",
]
WORDS += [
    "\x00",
    "\x85",
    "\u2028",
    "\ufeff",
    "-",
    "==",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|im_end|>",
    "\u0301",
    "١",
    "Ⅷ",
    "\U00011de1",
    "\U00016ff5",
]
CHARACTERS = st.characters(exclude_categories=("Cs",))
ANY_TEXT = st.one_of(
    st.text(CHARACTERS, max_size=60),
    st.lists(st.sampled_from(WORDS) | st.text(CHARACTERS, max_size=3), max_size=40).map("".join),
    st.tuples(st.sampled_from(WORDS), st.integers(1, 3_000)).map(lambda pair: pair[0] * pair[1]),
)


def shuffled_words() -> list[bytes]:
    """Words that no training gives: parts of texts in any order, so that many have parts of higher ranks or cannot be merged at all."""
    generator, data, words = random.Random(0), (CODE + MIXED + "aaaa" * 9 + " " * 40).encode(), set()
    while len(words) < 1_000:
        start = generator.randrange(len(data))
        words.add(data[start : start + generator.randrange(2, 9)])
    several = sorted(word for word in words if len(word) > 1)
    generator.shuffle(several)
    return [bytes([value]) for value in range(256)] + several


@pytest.fixture(scope="module", params=[(name, kind) for name in sorted(MODELS) for kind in ("trained", "shuffled")], ids="-".join)
def pair(request):
    """One of MODELS with a small vocabulary of its own, by gigatoken and by tiktoken."""
    name, kind = request.param
    model, data = small(name)[:2] if kind == "trained" else of_words(name, shuffled_words())
    return GigatokenTokenizer("small", model, data, 1), TiktokenTokenizer("small", model, data, 1)


def test_awkward_texts(pair):
    fast, slow = pair
    for text, ids in zip(TEXTS, fast.encode_arrays(TEXTS)):
        assert ids.tolist() == slow.encode_batch([text])[0], text[:50]
    assert fast.describe() == slow.describe() and (fast.encoder, slow.encoder) == ("gigatoken", "tiktoken")


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(st.lists(ANY_TEXT, max_size=4))
def test_any_text(pair, texts):
    fast, slow = pair
    assert fast.encode_batch(texts) == slow.encode_batch(texts)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_character_of_unicode(name):
    pairs = [bytes(pair) for pair in product(range(256), repeat=2)]  # so that a border between two pieces shows
    random.Random(0).shuffle(pairs)
    model, data = of_words(name, [bytes([value]) for value in range(256)] + pairs)
    fast, slow = GigatokenTokenizer("pairs", model, data, 1), TiktokenTokenizer("pairs", model, data, 1)
    letters = map(chr, chain(range(0xD800), range(0xE000, 0x110000)))
    known = [letter for letter in letters if not gigatoken_encoder.is_disputed(letter)]
    for first in range(0, len(known), 4_096):
        text = "\x01".join(f"aa{letter}aa1{letter}1  {letter}{letter}!{letter}\n'{letter}s" for letter in known[first : first + 4_096])
        assert np.array_equal(fast.encode_arrays([text])[0], slow.encode_arrays([text])[0]), hex(ord(known[first]))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_published_vocabularies(name):
    try:
        slow = load(name)
    except DataError:
        pytest.skip(f"{MODELS[name].package} is not installed")
    fast = load_encoder(name, 1, "gigatoken")
    assert isinstance(fast, GigatokenTokenizer)
    texts = [*TEXTS, *gigatoken_encoder.PROBE, "\u088fabc \U00011de1\U00011de2 x\U00033479\n\n"]
    assert fast.encode_batch(texts) == slow.encode_batch(texts)


def test_starting_anew_changes_nothing(pair, monkeypatch):
    fast, slow = pair
    monkeypatch.setattr(gigatoken_encoder, "MOST_GROWTH_BYTES", -(1 << 40))
    monkeypatch.setattr(gigatoken_encoder, "LEAST_CHARACTERS", 10)
    before = fast._library
    assert fast.encode_batch([CODE]) == fast.encode_batch([CODE]) == slow.encode_batch([CODE])
    assert fast._library is not before


# ---- the command --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Path:
    """A tiktoken file with GPT-2's number of words: bytes and pairs of bytes."""
    pairs = [bytes([first, second]) for first in range(32, 256) for second in range(32, 256)][:50_000]
    random.Random(0).shuffle(pairs)
    path = tmp_path_factory.mktemp("vocabulary") / "pairs.tiktoken"
    path.write_bytes(of_words("gpt2", [bytes([value]) for value in range(256)] + pairs)[1])
    return path


def tokenize(vocabulary: Path, folder: Path, encoder: str, *more: str):
    words = ["--source", "jsonl", "--tokenizer", vocabulary, "--input", folder / "in", "--no-bos", "--max-reject-fraction", 0.5]
    return run("tokenize", *words, "--output", folder / encoder, "--encoder", encoder, *more)


def write(folder: Path, texts: list[str]) -> None:
    (folder / "in").mkdir()
    for number in range(2):
        lines = [json.dumps({"text": text}) for text in texts[number::2]]
        (folder / "in" / f"{number}.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("processes", [1, 2])
def test_encoders_make_the_same_bytes(vocabulary, tmp_path, processes):
    write(tmp_path, [*TEXTS, "a lone \ud800 surrogate", CODE, "  "])
    said = {
        encoder: tokenize(vocabulary, tmp_path, encoder, "--workers", processes, "--json") for encoder in ("gigatoken", "tiktoken", "auto")
    }
    assert [code for code, _ in said.values()] == [0, 0, 0], said
    assert [json.loads(each.out)["encoder"] for _, each in said.values()] == ["gigatoken", "tiktoken", "gigatoken"]
    assert said["auto"][1].err.count("encoder: gigatoken\n") == 1
    for name in ("documents.bin", "documents.idx", "documents.manifest.json", "rejects.jsonl"):
        assert len({sha256_file(tmp_path / encoder / name) for encoder in said}) == 1, name
    assert "lone_surrogate" in (tmp_path / "auto" / "rejects.jsonl").read_text()


FAKE = """
import os, sys
class PanicException(BaseException):
    pass
class Library:
    def __init__(self, real):
        self.real = real
    def encode(self, text):
        ids = self.real.encode(text)
        if "FATAL" in text:
            {what}
        return ids
def load_hf_json(data):
    sys.path.remove({folder!r})
    for name in ("gigatoken", "gigatoken.gigatoken_rs"):
        del sys.modules[name]
    from gigatoken.gigatoken_rs import load_hf_json
    return Library(load_hf_json(data))
"""


def replace_library(folder: Path, monkeypatch, what: str) -> None:
    """Stand before gigatoken, here and in processes, and do `what` with a text that says FATAL."""
    (folder / "fake" / "gigatoken").mkdir(parents=True)
    (folder / "fake" / "gigatoken" / "__init__.py").touch()
    (folder / "fake" / "gigatoken" / "gigatoken_rs.py").write_text(FAKE.format(what=what, folder=str(folder / "fake")))
    monkeypatch.syspath_prepend(folder / "fake")
    for name in [name for name in sys.modules if name.split(".")[0] == "gigatoken"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "raise PanicException('index out of range')",
            "1.jsonl, line 2: gigatoken gave up on it (index out of range); finished parts are kept",
        ),
        ("ids = ids[1:]", "1.jsonl, line 2: gigatoken finds other ids than tiktoken; finished parts are kept"),
        (
            "os.abort()",
            "1.jsonl was killed by SIGABRT (if the encoder gigatoken is at work and this happens again, add --encoder tiktoken)",
        ),
    ],
)
def test_a_failure_names_the_document_and_the_way_out(vocabulary, tmp_path, monkeypatch, what, message):
    write(tmp_path, ["first", "second"])
    (tmp_path / "in" / "1.jsonl").write_text('\n{"text": "FATAL"}\n')  # the first document of a part is always checked
    replace_library(tmp_path, monkeypatch, what)
    code, said = tokenize(vocabulary, tmp_path, "auto", "--workers", 1)
    assert code == 2 and message in said.err and "--encoder tiktoken" in said.err and "Traceback" not in said.err
    assert not (tmp_path / "auto" / "documents.bin").exists()
    assert [path.name for path in (tmp_path / "auto" / "parts").glob("*.bin")] == ["00000-0.bin"]
    (tmp_path / "auto").rename(tmp_path / "tiktoken")
    assert tokenize(vocabulary, tmp_path, "tiktoken", "--workers", 1)[0] == 0


def test_a_library_that_fails_the_probe_is_refused_or_passed_over(vocabulary, tmp_path, monkeypatch):
    monkeypatch.setattr(gigatoken_encoder, "PROBE", ("fine", "FATAL"))
    for what, reason in (
        ("ids = ids[::-1]", "it finds other ids than tiktoken"),
        ("raise PanicException('x')", "gigatoken gave up on it (x)"),
    ):
        with monkeypatch.context() as patch:
            folder = tmp_path / reason[:3].strip()
            replace_library(folder, patch, what)
            with pytest.raises(DataError, match="fails on the text 'FATAL'") as refused:
                load_encoder(vocabulary, 1, "gigatoken")
            assert reason in str(refused.value) and str(refused.value).endswith("use --encoder tiktoken")
        with monkeypatch.context() as patch:
            replace_library(folder / "again", patch, what)
            passed = load_encoder(vocabulary, 1, "auto")
            assert passed.encoder == "tiktoken" and reason in gigatoken_encoder.said(passed, "auto")


def test_a_vocabulary_that_it_cannot_take(monkeypatch):
    model, data = of_words("gpt2", [bytes([value]) for value in range(250)])
    tokenizer = TiktokenTokenizer("torn", model, data, 1)
    monkeypatch.setattr(gigatoken_encoder, "tokenizer_json", lambda *_: "{}")
    with pytest.raises(DataError, match="gigatoken cannot take the tokenizer torn .*; use --encoder tiktoken"):
        with_encoder(tokenizer, "gigatoken")
    assert with_encoder(tokenizer, "auto") is tokenizer


def test_an_error_that_is_no_panic_is_no_document_s_fault(pair, monkeypatch):
    fast, _ = pair
    with pytest.raises(TypeError):
        fast.encode_arrays(["a", "\ud800"])

    class Panics:
        def encode(self, text: str) -> np.ndarray:
            raise type("PanicException", (BaseException,), {})("no")

    monkeypatch.setattr(fast, "_library", Panics())
    with pytest.raises(EncodingFailed) as failed:
        fast.encode_arrays(["a"])
    assert failed.value.number == 0


def test_an_encoder_that_does_not_fit_or_is_missing(vocabulary, tmp_path, monkeypatch):
    write(tmp_path, ["a", "b"])
    monkeypatch.setattr(gigatoken_encoder, "gigatoken_version", lambda: None)
    code, said = tokenize(vocabulary, tmp_path, "gigatoken")
    assert code == 2 and said.err.startswith(
        "error: --encoder gigatoken needs the package gigatoken; install it: pip install gigatoken==0.10.0"
    )
    assert tokenize(vocabulary, tmp_path, "auto", "--workers", 1)[1].err.startswith(
        "encoder: tiktoken (gigatoken would be faster: pip install"
    )
