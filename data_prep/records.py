"""What a reader hands over: documents, and records that cannot be documents."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Raw:
    """One record as it was found: its fields, not yet looked at. `line` is a line, a row of a table or a member of an archive, from 1."""

    line: int
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """One document. `line` is where it begins in its file, counted from 1."""

    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Reject:
    """One record that cannot be used. `reason` is one of a few fixed words, `detail` says more."""

    file: str
    line: int
    reason: str
    detail: str


def field(fields: Mapping[str, Any], name: str) -> Any:
    """The field `name`, or `a.b` for the key b within the field a. Raises KeyError."""
    if name in fields:
        return fields[name]
    value: Any = fields
    for key in name.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(name)
        value = value[key]
    return value


def document(file: str, raw: Raw, text_keys: tuple[str, ...]) -> Record | Reject:
    """The record's document: the first of `text_keys` that it has."""
    for key in text_keys:
        with contextlib.suppress(KeyError):
            text = field(raw.fields, key)
            break
    else:
        return Reject(
            file, raw.line, "missing_key", f"it has {', '.join(list(raw.fields)[:20]) or 'no keys'}, not {' or '.join(text_keys)}"
        )
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            return Reject(file, raw.line, "invalid_utf8", f"byte {error.start} of {key}: {error.reason}")
    if not isinstance(text, str):
        return Reject(file, raw.line, "not_a_string", f"{key} is {type(text).__name__}")
    if not text or text.isspace():
        return Reject(file, raw.line, "empty_text", f"{len(text)} characters, all of them white space")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return Reject(file, raw.line, "lone_surrogate", f"U+{ord(text[error.start]):04X} at character {error.start}")
    return Record(file, raw.line, text)
