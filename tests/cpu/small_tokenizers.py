"""Small tokenizers with the patterns of published ones, and texts that are awkward to them."""

import base64
from dataclasses import replace

from data_prep.tiktoken_tokenizers import MODELS, Model, byte_letters

CODE = "def f(x):\n\tif x != 0:\n\t\treturn {'a': [1, 22, 333, 4444]}\n\n\n\n    # it's, I'LL, we've  \r\n"
MIXED = "naïve Ünïcode 日本語のテキスト、中文。한국어 العربية עברית ไทย हिन्दी e\u0301 ﬁ 🙂👩‍👩‍👧"
MIXED += " \u00a0\u3000\u2003 \x00\x1b\x7f\x1c\ufeff <|end_of_text|> <|im_end|>"
RUNS = [
    " " * 150_000,
    " " * 150_000 + "x",
    "x" + "\t" * 3_000 + "5",
    "-" + "\n" * 9_000 + " " * 2_500 + "\n",
    " \n" * 4_000,
    "\u3000 " * 1_500 + "日",
]
RUNS += ["a" * 60_000, "-" * 20_000, "7" * 20_000, "🙂" * 4_000, "的" * 20_000, "\r\n" * 3_000]
TEXTS = ["Hello world", "", " ", CODE, MIXED, CODE + MIXED * 3 + "  ", *RUNS]


def hugging_face(pattern: str):
    """An untrained byte-level tokenizer that splits by `pattern`, as published tokenizer.json files of such models do."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    model = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    model.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    model.decoder = decoders.ByteLevel()
    return model


def small(name: str):
    """One of MODELS with a trained vocabulary of its own: the model, its tiktoken file, and the same in Hugging Face's library."""
    from tokenizers import normalizers, pre_tokenizers, trainers

    theirs = hugging_face(MODELS[name].pattern)
    if MODELS[name].normalize:
        theirs.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    theirs.train_from_iterator([CODE, MIXED, " " * 40, "aaaa " * 20, "\n" * 30, "\t\t\t\t"] * 5, trainer)
    values = {letter: value for value, letter in enumerate(byte_letters())}
    words = sorted(theirs.get_vocab().items(), key=lambda entry: entry[1])
    model, data = of_words(name, [bytes(values[letter] for letter in word) for word, _ in words])
    return model, data, theirs


def of_words(name: str, words: list[bytes]) -> tuple[Model, bytes]:
    """One of MODELS with these words, and its tiktoken file."""
    lines = [base64.b64encode(word) + b" %d" % rank for rank, word in enumerate(words)]
    return replace(MODELS[name], words=len(words)), b"\n".join(lines) + b"\n"
