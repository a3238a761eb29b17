"""The vocabularies of tiktoken_tokenizers through the library gigatoken, which finds the same ids many times faster.

The library is young, so it is believed only where it agrees with tiktoken: on PROBE when it is loaded, and on a sample of the documents.
"""

import json
import re
from functools import cached_property
from typing import Any

import numpy as np
import psutil

from data_prep.encoders import GIGATOKEN, gigatoken_version
from data_prep.tiktoken_tokenizers import Model, TiktokenTokenizer, byte_letters
from data_prep.tokenizer_base import EncodingFailed, Tokenizer
from hybrid_megatron.errors import DataError

# Letters and numbers of Unicode 17, which tiktoken knows and gigatoken does not: texts that hold one are tiktoken's.
_LETTERS = "\u088f\u0c5c\u0cdc\ua7ce\ua7cf\ua7d2\ua7d4\ua7f1"
_RANGES = "\U00010940-\U00010959\U00010ec5-\U00010ec7\U00011db0-\U00011ddb\U00011de0-\U00011de9\U00016ea0-\U00016ed3\U00016ff2-\U00016ff6"
_RANGES += "\U000187f8-\U000187ff\U00018d09-\U00018d1e\U00018d80-\U00018df2\U0001e6c0-\U0001e6ff\U0002b73a-\U0002b73f"
_RANGES += "\U0002cea2-\U0002cead\U000323b0-\U00033479"
_BEYOND_16_BITS = re.compile(f"[{_RANGES}]")
# The library remembers every word it has met. Once the process has grown by so much, it starts anew, but not after each large document.
MOST_GROWTH_BYTES = 128_000_000
LEAST_CHARACTERS = 32_000_000

# Of ranges of letters and numbers that Unicode 15.1 and 16 added: there, tables of different age would differ.
_RECENT = "\u1c89\ua7cb\ua7da\U000105c0\U00010d40\U00010d4a\U00010ec2\U00011380\U00011bc0\U00011bf0\U000116d0\U00013460\U00016100"
_RECENT += "\U00016130\U00016d40\U00016d70\U0001ccf0\U0001e5d0\U0001e5f1\U0002ebf0"
PROBE = (
    "Hello world, it's 12345678 o'CLOCK; I'LL've don'T 'ſa 'K '",
    "def f(x):\n\tif x != 0:\r\n\r\n        return {'a': [1, 22, 333]}\n\n\n   \n # fin  ",
    "naïve Ünïcode 日本語のテキスト、中文。한국어 العربية עברית ไทย हिन्दी e\u0301 ﬁ Å ½ Ⅷ ² ١٢٣ 🙂👩‍👩‍👧 \u00ad\u200b\ufeff\ufffd",
    "\x00\x1b\x7f\x1c\x85\xa0\u1680\u2003\u2028\u202f\u3000 \u3000\n\u3000x \u00a05\t\t.\v\f",
    "<|begin_of_text|><|end_of_text|> <|endoftext|><|im_end|><|eot_id|></think>",
    " " * 300 + "x" + "\t" * 90 + "\n" * 90 + "a" * 700 + "-" * 700 + "7" * 700 + "的" * 300 + "🙂" * 90 + "ab" * 300 + "ACGT" * 90,
    "antidisestablishmentarianism Pneumonoultramicroscopicsilicovolcanoconiosis qqqqxzvwkj ZZZZyyyxx /usr/lib/x86_64-linux-gnu//==>>",
    "".join(f"a{letter}b {letter}{letter} 1{letter}2{letter}\n'{letter}s-{letter}. " for letter in _RECENT),
)


class GigatokenTokenizer(TiktokenTokenizer):
    """A TiktokenTokenizer whose texts gigatoken encodes: to the manifest, and to every reader, the same tokenizer.

    `prepared` is its `tokenizer_json`, where that has been made before. Raises `DataError` where the library cannot take the vocabulary
    or its ids on PROBE are not tiktoken's.
    """

    encoder = "gigatoken"

    def __init__(self, name: str, model: Model, data: bytes, threads: int, prepared: str = ""):
        super().__init__(name, model, data, threads)
        self._json = prepared or tokenizer_json(model, self.ranks)
        self._start()
        for text in PROBE:
            try:
                problem = "" if self.agrees(text, self.encode_arrays([text])[0]) else "it finds other ids than tiktoken"
            except EncodingFailed as failure:
                problem = failure.reason
            if problem:
                raise DataError(f"gigatoken {gigatoken_version()} fails on the text {text[:20]!r}... ({problem}); use --encoder tiktoken")

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        if self._characters > LEAST_CHARACTERS and self._process.memory_info().rss - self._size > MOST_GROWTH_BYTES:
            self._start()
        encoded = []
        for number, text in enumerate(texts):
            try:
                encoded.append(self._ids(text))
            except BaseException as error:
                if not _is_panic(error):
                    raise
                raise EncodingFailed(number, f"gigatoken gave up on it ({error})") from None
        return encoded

    def agrees(self, text: str, ids: np.ndarray) -> bool:
        return np.array_equal(super().encode_arrays([text])[0], ids)

    def _ids(self, text: str) -> np.ndarray:
        self._characters += len(text)
        if is_disputed(text):
            return super().encode_arrays([text])[0]
        normalize = self.model.normalize
        return self._library.encode(normalize(text) if normalize else text)

    @cached_property
    def _process(self) -> psutil.Process:
        return psutil.Process()

    def _start(self) -> None:
        self._library: Any = None  # before there are two of them
        try:
            from gigatoken.gigatoken_rs import load_hf_json  # the package's own Tokenizer would bring the library awkward along

            self._library = load_hf_json(self._json)
        except BaseException as error:
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            reason = str(error).strip().splitlines()[0]
            raise DataError(f"gigatoken cannot take the tokenizer {self.name} ({reason}); use --encoder tiktoken") from None
        self._characters, self._size = 0, self._process.memory_info().rss


def is_disputed(text: str) -> bool:
    """Whether a character of `text` is a letter or a number to one of the two libraries alone."""
    if text.isascii():
        return False
    if any(letter in text for letter in _LETTERS):
        return True
    # The expression is slow, and few texts hold anything beyond 16 bits.
    return len(text.encode("utf-16-le", "surrogatepass")) != 2 * len(text) and _BEYOND_16_BITS.search(text) is not None


def tokenizer_json(model: Model, ranks: dict[bytes, int]) -> str:
    """A tiktoken vocabulary as a Hugging Face tokenizer.json without special tokens.

    tiktoken takes a piece that is a word as it is (`ignore_merges`), and else merges, of all neighbours whose concatenation is a word,
    those of the lowest rank first: so every division of a word into two words is a merge, at the word's own place.
    """
    letters = "".join(byte_letters())
    words = {word.decode("latin-1").translate(letters): rank for word, rank in ranks.items()}
    in_order = sorted(words, key=words.__getitem__)
    cuts = ((word, cut) for word in in_order for cut in range(1, len(word)))
    merges = [f"{word[:cut]} {word[cut:]}" for word, cut in cuts if word[:cut] in words and word[cut:] in words]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": model.is_byte_level}
    split = {"type": "Split", "pattern": {"Regex": model.pattern}, "behavior": "Isolated", "invert": False}
    made = {
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level if model.is_byte_level else {"type": "Sequence", "pretokenizers": [split, level]},
        "model": {"type": "BPE", "ignore_merges": True, "vocab": words, "merges": merges},
    }
    return json.dumps(made, separators=(",", ":"), ensure_ascii=False)


def prepare(tokenizer: Tokenizer, encoder: str) -> str:
    """What `with_encoder` takes a while to make and processes can share; "" for nothing."""
    if not applies(tokenizer, encoder):
        return ""
    assert isinstance(tokenizer, TiktokenTokenizer)
    return tokenizer_json(tokenizer.model, tokenizer.ranks)


def with_encoder(tokenizer: Tokenizer, encoder: str, prepared: str = "") -> Tokenizer:
    """The same tokenizer by one of ENCODERS; "auto" is gigatoken where that is installed and agrees. Raises `DataError`."""
    if not applies(tokenizer, encoder):
        return tokenizer
    assert isinstance(tokenizer, TiktokenTokenizer)
    try:
        return GigatokenTokenizer(*tokenizer.made_from, prepared)
    except DataError as error:
        if encoder != "auto":
            raise
        tokenizer.why_not_faster = str(error)
        return tokenizer


def applies(tokenizer: Tokenizer, encoder: str) -> bool:
    """Whether gigatoken is to be tried. Raises `DataError` where an encoder is asked for that does not fit or is not installed."""
    fits = isinstance(tokenizer, TiktokenTokenizer)
    if encoder != "auto" and not fits:
        raise DataError(
            f"--encoder {encoder} is for the vocabularies of tiktoken (llama3, qwen3, gpt2), and {tokenizer.name} is of the kind "
            f"{tokenizer.kind}; leave --encoder out"
        )
    if encoder == "gigatoken" and gigatoken_version() is None:
        raise DataError(f"--encoder gigatoken needs the package gigatoken; install it: pip install {GIGATOKEN}, or use --encoder tiktoken")
    return fits and encoder != "tiktoken" and gigatoken_version() is not None


def said(tokenizer: Tokenizer, encoder: str) -> str:
    """Which encoder is at work, and, where it might be a faster one, why not."""
    why = tokenizer.why_not_faster
    if not why and encoder == "auto" and isinstance(tokenizer, TiktokenTokenizer) and gigatoken_version() is None:
        why = f"gigatoken would be faster: pip install {GIGATOKEN}"
    return tokenizer.encoder + (f" ({why})" if why else "")


def _is_panic(error: BaseException) -> bool:
    # Rust's panics come as a BaseException whose class can be had from nowhere.
    return type(error).__name__ == "PanicException"
