"""Tokenizers: training, loading each kind, round trips, and what is said where one cannot be had."""

import json
from pathlib import Path

import pytest

from data_prep.cli import main
from data_prep.manifest import sha256_file
from data_prep.tokenizers import load
from hybrid_megatron.errors import DataError

TEXT = "It was a bright cold day in April.\n\n    The clocks, all 13 of them,\twere striking.  \n"


def train(folder: Path, *more: str, text: str = TEXT) -> int:
    (folder / "corpus.txt").write_text(text)
    source = ["--source", "text", "--input", str(folder / "corpus.txt")]
    try:
        return main(["train-tokenizer", *source, "--output", str(folder / "tokenizer.model"), "--vocab-size", "310", *more])
    except SystemExit as leaving:
        return int(leaving.code or 0)


def test_training_is_deterministic_and_quiet(tmp_path, capfd):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert train(tmp_path / "a") == 0 and train(tmp_path / "b") == 0
    assert sha256_file(tmp_path / "a" / "tokenizer.model") == sha256_file(tmp_path / "b" / "tokenizer.model")
    written = capfd.readouterr()
    assert written.err == "" and len(written.out.splitlines()) == 2


def test_text_comes_back_unchanged(tmp_path):
    assert train(tmp_path) == 0
    tokenizer = load(tmp_path / "tokenizer.model")
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.bos, tokenizer.eos) == ("sentencepiece", 310, 1, 2)
    texts = [TEXT, " leads and trails ", "\n\n\n", "a\r\nb"]
    texts += ["naïve 日本語 🙂", "<s> </s> <unk>", "\0", "ﬁ Å e\u0301 \u00a0 \u3000"]
    encoded = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert all(index > 2 for ids in encoded for index in ids)
    assert tokenizer.encode_batch(["\n\n"]) == [[3, 3]]


def test_training_again_is_complete_and_other_settings_need_overwrite(tmp_path, capsys):
    assert train(tmp_path) == 0
    before = sha256_file(tmp_path / "tokenizer.model")
    assert train(tmp_path) == 0
    assert "already complete" in capsys.readouterr().out
    assert train(tmp_path, "--vocab-size", "300") == 2
    assert "options.vocab_size 310 -> 300" in capsys.readouterr().err
    assert sha256_file(tmp_path / "tokenizer.model") == before
    assert train(tmp_path, "--vocab-size", "300", "--overwrite") == 0
    assert load(tmp_path / "tokenizer.model").vocab_size == 300


def test_a_vocabulary_that_the_text_cannot_fill(tmp_path, capsys):
    assert train(tmp_path, "--vocab-size", "9000") == 2
    message = capsys.readouterr().err
    assert message.startswith("error: --vocab-size 9000 cannot be trained") and message.count("\n") == 1
    assert not (tmp_path / "tokenizer.model").exists()
    assert train(tmp_path, text="  \n") == 2
    assert "no usable document" in capsys.readouterr().err


def huggingface_folder(folder: Path) -> Path:
    """A byte-level tokenizer with special tokens, a post-processor and truncation, as published ones have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|begin|>", "<|end|>"], initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator([TEXT] * 5, trainer)
    model.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    model.enable_truncation(4)
    model.enable_padding(length=4)
    folder.mkdir()
    model.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_huggingface_folder_and_file(tmp_path):
    folder = huggingface_folder(tmp_path / "mine")
    tokenizer = load(folder)
    assert (tokenizer.name, tokenizer.kind, tokenizer.bos, tokenizer.eos) == ("mine", "huggingface", 0, 1)
    assert tokenizer.fingerprint == f"sha256:{sha256_file(folder / 'tokenizer.json')}"
    ids = tokenizer.encode_batch([TEXT, "<|end|>"])
    assert [tokenizer.decode(one) for one in ids] == [TEXT, "<|end|>"]
    assert all(index > 1 for one in ids for index in one) and max(map(max, ids)) < tokenizer.vocab_size
    assert load(folder / "tokenizer.json").name == "tokenizer.json"
    (folder / "tokenizer_config.json").unlink()
    assert (load(folder).bos, load(folder).eos) == (None, None)


def test_no_bos_is_asked_for_where_the_tokenizer_has_none(tmp_path, capsys):
    folder = huggingface_folder(tmp_path / "mine")
    (folder / "tokenizer_config.json").unlink()
    (tmp_path / "a.txt").write_text(TEXT)
    words = ["tokenize", "--source", "text", "--input", str(tmp_path / "a.txt")]
    words += ["--tokenizer", str(folder), "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "add --no-bos" in capsys.readouterr().err
    assert main([*words, "--no-bos", "--no-eos", "--workers", "1"]) == 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty", None, "holds neither tokenizer.json nor tokenizer.model"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be used"),
        ("tokenizer.model", "not a model", "neither a SentencePiece model nor a tiktoken file"),
        ("gone.model", "", "gone.model does not exist"),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded(tmp_path, name, content, message):
    path = tmp_path / name
    if content is None:
        path.mkdir()
    elif content:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        load(path)
