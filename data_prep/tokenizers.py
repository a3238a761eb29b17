"""Tokenizers behind one small interface: SentencePiece and Hugging Face here, tiktoken's in a file of their own; and how one is found.

Text never turns into special tokens here, whatever it says: a document that contains the words `<|end_of_text|>` stays one document.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from data_prep.gigatoken_encoder import with_encoder
from data_prep.tiktoken_tokenizers import MODELS, from_ranks, load_named
from data_prep.tokenizer_base import Tokenizer, fingerprint, require
from hybrid_megatron.errors import DataError


class SentencePieceTokenizer(Tokenizer):
    kind = "sentencepiece"

    def __init__(self, name: str, data: bytes, threads: int):
        sentencepiece = require("sentencepiece", "0.2.3")
        self.name, self.fingerprint, self._threads = name, fingerprint(data), threads
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
        tokenizers = require("tokenizers", "0.23.3")
        self.name, self.fingerprint = name, fingerprint(data)
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


def load_encoder(name_or_path: str | Path, threads: int, encoder: str, prepared: str = "") -> Tokenizer:
    """The tokenizer that `load` finds, to encode much text by one of `encoders.ENCODERS`. Raises `DataError`."""
    return with_encoder(load(name_or_path, threads), encoder, prepared)


def load(name_or_path: str | Path, threads: int = 1) -> Tokenizer:
    """Load a tokenizer: a SentencePiece `.model`, a Hugging Face folder, `tokenizer.json` or hub name; llama3, qwen3 or gpt2.

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
    if name in MODELS:
        return load_named(name, threads)
    if path.is_absolute() or name.startswith(".") or path.suffix in (".model", ".json") or name.count("/") > 1:
        raise DataError(f"--tokenizer {name} does not exist; train one with `python -m data_prep train-tokenizer` or name another")
    return _from_hub(name, threads)


def _from_model_file(name: str, data: bytes, threads: int) -> Tokenizer:
    # Both formats are usually called tokenizer.model. A tiktoken file is text, a SentencePiece model is protobuf.
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\n", data):
        return from_ranks(name, data, threads)
    return SentencePieceTokenizer(name, data, threads)


def _from_hub(name: str, threads: int) -> Tokenizer:
    # Through huggingface_hub, not transformers: the latter is slow to import and brings torch along.
    hub = require("huggingface_hub", "2.4.0")
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


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"tokenizer {path} cannot be read ({error.strerror}); check the file") from None
