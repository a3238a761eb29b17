"""Tokenizers behind one small interface: SentencePiece, Hugging Face and Llama 3's tiktoken format.

Text never turns into special tokens here, whatever it says: a document that contains the words `<|end_of_text|>` stays one document.
"""

import base64
import hashlib
import importlib
import importlib.metadata
import json
import os
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from hybrid_megatron.errors import DataError

LLAMA3_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_RANKS, LLAMA3_VOCAB, LLAMA3_BOS, LLAMA3_EOS = 128_000, 128_256, 128_000, 128_001
LLAMA3_PACKAGE, LLAMA3_FILE = "llama-models", "llama_models/llama3/tokenizer.model"
# Llama's own encoder cuts such runs too: the regular expression underneath overflows its stack on a long one.
LONGEST_RUN = 25_000


class Tokenizer(ABC):
    """`bos` and `eos` are ids or None; ids are below `vocab_size`; `fingerprint` is "sha256:" of the tokenizer's file."""

    name: str
    kind: str
    fingerprint: str
    vocab_size: int
    bos: int | None
    eos: int | None

    @abstractmethod
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without BOS or EOS."""

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """The text of `ids`."""

    def describe(self) -> dict[str, Any]:
        """The manifest's `tokenizer`."""
        return {key: getattr(self, key) for key in ("name", "kind", "fingerprint", "vocab_size", "bos", "eos")}


class SentencePieceTokenizer(Tokenizer):
    kind = "sentencepiece"

    def __init__(self, name: str, data: bytes, threads: int):
        sentencepiece = _require("sentencepiece", "0.2.3")
        self.name, self.fingerprint, self._threads = name, _fingerprint(data), threads
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=data)
        except RuntimeError:
            raise DataError(f"tokenizer {name} is neither a SentencePiece model nor a tiktoken file; name another --tokenizer") from None
        self.vocab_size = self._model.get_piece_size()
        self.bos, self.eos = (None if index < 0 else index for index in (self._model.bos_id(), self._model.eos_id()))

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return self._model.encode(texts, num_threads=self._threads)

    def decode(self, ids: list[int]) -> str:
        return self._model.decode([int(index) for index in ids])


class HuggingFaceTokenizer(Tokenizer):
    kind = "huggingface"

    def __init__(self, name: str, data: bytes, settings: list[dict[str, Any]], threads: int):
        # The library's pool of threads is made on first use and reads these then.
        os.environ["RAYON_NUM_THREADS"] = str(threads)
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
        tokenizers = _require("tokenizers", "0.23.3")
        self.name, self.fingerprint = name, _fingerprint(data)
        try:
            self._model = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"tokenizer {name}: tokenizer.json cannot be used ({error}); name another --tokenizer") from None
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True
        self.vocab_size = max(self._model.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos, self.eos = (self._special(role, settings) for role in ("bos", "eos"))

    def _special(self, role: str, settings: list[dict[str, Any]]) -> int | None:
        """The id of BOS or EOS by the first of the tokenizer's configuration files that names one."""
        for values in settings:
            token, index = values.get(f"{role}_token"), values.get(f"{role}_token_id")
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str) and self._model.token_to_id(token) is not None:
                return self._model.token_to_id(token)
            if isinstance(index, list) and index:
                index = index[0]
            if isinstance(index, int):
                return index
        return None

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._model.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        return self._model.decode([int(index) for index in ids], skip_special_tokens=False)


class Llama3Tokenizer(Tokenizer):
    """Llama 3's words from a tiktoken file: one line `base64(word) rank` for each of the 128,000; 256 special tokens follow them."""

    kind = "tiktoken"

    def __init__(self, name: str, data: bytes, threads: int):
        tiktoken = _require("tiktoken", "0.14.0")
        self.name, self.fingerprint, self._threads = name, _fingerprint(data), threads
        try:
            pairs = (line.split() for line in data.splitlines() if line)
            ranks = {base64.b64decode(word, validate=True): int(rank) for word, rank in pairs}
        except ValueError as error:
            raise DataError(f"tokenizer {name}: a line is not `base64 rank` ({error}); the file is damaged, fetch it again") from None
        if len(ranks) != LLAMA3_RANKS:
            raise DataError(
                f"tokenizer {name} is a tiktoken file of {len(ranks)} words; the special tokens of only one are known here, Llama 3's of "
                f"{LLAMA3_RANKS}; name that or another kind of tokenizer"
            )
        self._model = tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=_llama3_special_tokens())
        self.vocab_size, self.bos, self.eos = LLAMA3_VOCAB, LLAMA3_BOS, LLAMA3_EOS

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        pieces = [cut_runs(text) for text in texts]
        encoded = iter(self._model.encode_ordinary_batch([piece for cut in pieces for piece in cut], num_threads=self._threads))
        return [[index for _ in cut for index in next(encoded)] if len(cut) > 1 else next(encoded) for cut in pieces]

    def decode(self, ids: list[int]) -> str:
        return self._model.decode([int(index) for index in ids])


def cut_runs(text: str) -> list[str]:
    """Cut after every 25,000 characters of unbroken white space or unbroken other text; nearly every text stays whole."""
    if len(text) < LONGEST_RUN:
        return [text]
    runs = (match.span() for match in re.finditer(r"\s+|\S+", text))
    ends = [end for first, last in runs for end in range(first + LONGEST_RUN, last, LONGEST_RUN)]
    return [text[first:last] for first, last in zip([0, *ends], [*ends, len(text)], strict=True)]


def _llama3_special_tokens() -> dict[str, int]:
    named = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 8: "eom_id", 9: "eot_id"}
    taken = {LLAMA3_RANKS + offset: f"<|{name}|>" for offset, name in named.items()}
    free = iter(range(LLAMA3_VOCAB))
    return {taken.get(index) or f"<|reserved_special_token_{next(free)}|>": index for index in range(LLAMA3_RANKS, LLAMA3_VOCAB)}


def load(name_or_path: str | Path, threads: int = 1) -> Tokenizer:
    """Load a tokenizer: a SentencePiece `.model`, a Hugging Face folder, `tokenizer.json` or hub name, or `llama3`.

    `threads` is how many threads `encode_batch` uses. Raises `DataError` if nothing fits.
    """
    name = str(name_or_path)
    path = Path(name)
    if path.is_file():
        if path.suffix == ".json":
            return HuggingFaceTokenizer(path.name, _read(path), _settings(path.parent), threads)
        return _from_model_file(path.name, _read(path), threads)
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            return HuggingFaceTokenizer(path.resolve().name, _read(path / "tokenizer.json"), _settings(path), threads)
        if (path / "tokenizer.model").is_file():
            return _from_model_file("tokenizer.model", _read(path / "tokenizer.model"), threads)
        raise DataError(f"--tokenizer {name}: the folder holds neither tokenizer.json nor tokenizer.model; name the folder that does")
    if name == "llama3":
        return Llama3Tokenizer(name, _read(_llama3_file()), threads)
    if path.is_absolute() or name.startswith(".") or path.suffix in (".model", ".json") or name.count("/") > 1:
        raise DataError(f"--tokenizer {name} does not exist; train one with `python -m data_prep train-tokenizer` or name another")
    return _from_hub(name, threads)


def _from_model_file(name: str, data: bytes, threads: int) -> Tokenizer:
    # Both formats are usually called tokenizer.model. A tiktoken file is text, a SentencePiece model is protobuf.
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\n", data):
        return Llama3Tokenizer(name, data, threads)
    return SentencePieceTokenizer(name, data, threads)


def _from_hub(name: str, threads: int) -> Tokenizer:
    # Through huggingface_hub, not transformers: the latter is slow to import and brings torch along.
    hub = _require("huggingface_hub", "2.4.0")
    files = {}
    for file in ("tokenizer.json", *_SETTINGS_FILES):
        try:
            files[file] = Path(hub.hf_hub_download(name, file)).read_bytes()
        except Exception as error:  # network, authorisation, missing file: many types, one answer
            if file == "tokenizer.json":
                reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
                raise DataError(
                    f"--tokenizer {name} is no file or folder here, and the hub gave no tokenizer.json for it ({reason}); "
                    "give the path of a tokenizer or a hub name"
                ) from None
    settings = [json.loads(files[file]) for file in _SETTINGS_FILES if file in files]
    return HuggingFaceTokenizer(name, files["tokenizer.json"], settings, threads)


_SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "config.json")


def _settings(folder: Path) -> list[dict[str, Any]]:
    found = []
    for file in _SETTINGS_FILES:
        if (folder / file).is_file():
            try:
                values = json.loads(_read(folder / file))
            except ValueError as error:
                raise DataError(f"{folder / file} is not JSON ({error}); mend it or fetch the tokenizer again") from None
            if isinstance(values, dict):
                found.append(values)
    return found


def _llama3_file() -> Path:
    try:
        path = Path(str(importlib.metadata.distribution(LLAMA3_PACKAGE).locate_file(LLAMA3_FILE)))
    except importlib.metadata.PackageNotFoundError:
        path = None
    if path is None or not path.is_file():
        raise DataError(
            "--tokenizer llama3 needs Llama 3's tokenizer.model: accept its licence and `pip install --no-deps llama-models==0.3.0`, "
            "or give the path of your copy instead of the name"
        )
    return path


def _require(module: str, version: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(f"this tokenizer needs the package {module}; install it: pip install {module}=={version}") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"tokenizer {path} cannot be read ({error.strerror}); check the file") from None


def _fingerprint(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()
