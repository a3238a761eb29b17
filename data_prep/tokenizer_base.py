"""What every tokenizer offers, whatever library is behind it."""

import hashlib
import importlib
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from hybrid_megatron.errors import DataError


class EncodingFailed(Exception):
    """A library could not encode the text `number` of a list, for `reason`."""

    def __init__(self, number: int, reason: str):
        super().__init__(reason)
        self.number, self.reason = number, reason


class Tokenizer(ABC):
    """`bos` and `eos` are ids or None; ids are below `vocab_size`; `fingerprint` is "sha256:" of the tokenizer's file. `encoder` is the
    library that encodes, and `why_not_faster` why it is not the fastest one."""

    name: str
    kind: str
    fingerprint: str
    vocab_size: int
    bos: int | None
    eos: int | None
    why_not_faster: str = ""

    @property
    def encoder(self) -> str:
        return self.kind

    @abstractmethod
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without BOS or EOS."""

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        """The same as arrays of integers. Raises `EncodingFailed`."""
        return [np.array(ids, np.int64) for ids in self.encode_batch(texts)]

    def agrees(self, text: str, ids: np.ndarray) -> bool:
        """Whether a slower and better proven library, where there is one, finds the same ids."""
        return True

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """The text of `ids`."""

    def describe(self) -> dict[str, Any]:
        """The manifest's `tokenizer`."""
        return {key: getattr(self, key) for key in ("name", "kind", "fingerprint", "vocab_size", "bos", "eos")}


def require(module: str, version: str) -> Any:
    """The module of an optional package. Raises `DataError` where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(f"this tokenizer needs the package {module}; install it: pip install {module}=={version}") from None


def fingerprint(data: bytes) -> str:
    """How a manifest names the file of a tokenizer."""
    return "sha256:" + hashlib.sha256(data).hexdigest()
