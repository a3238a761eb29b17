"""Which records of a corpus are wanted, by their fields: comparisons, and a language with its score."""

import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from data_prep.records import field
from hybrid_megatron.errors import DataError

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, words: value in words,
    "contains": lambda value, part: part in value,
    "matches": lambda value, pattern: re.search(pattern, value) is not None,
}


class MissingField(Exception):
    """A record lacks what a filter compares, or holds a value of another type there."""


@dataclass(frozen=True)
class Where:
    """`FIELD OP VALUE`; VALUE is a value of its own type: a number, a string, for `in` a list."""

    name: str
    operator: str
    value: Any

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.name,)

    def __str__(self) -> str:
        return f"{self.name} {self.operator} {json.dumps(self.value, ensure_ascii=False)}"

    def keeps(self, fields: Mapping[str, Any]) -> bool:
        """Whether a record with these fields is wanted. Raises `MissingField`."""
        try:
            found = field(fields, self.name)
            return bool(OPERATORS[self.operator](found, self.value))
        except KeyError:
            raise MissingField(f"{self.name} is not among {', '.join(list(fields)[:20])}") from None
        except TypeError:
            raise MissingField(f"{self.name} is {type(found).__name__}, which cannot be compared with {self.value!r}") from None


@dataclass(frozen=True)
class Language:
    """Documents in `language` with a score of at least `minimum`.

    `name` is a field that holds the language, with its score in the field `score` (looked at where there is a minimum); or an object of
    scores by language, which lacks those that were not found.
    """

    language: str
    minimum: float
    name: str
    score: str

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.name, self.score)

    def __str__(self) -> str:
        return f"language {self.language} at {self.minimum:g}"

    def keeps(self, fields: Mapping[str, Any]) -> bool:
        """Whether a record with these fields is wanted. Raises `MissingField`."""
        try:
            found = field(fields, self.name)
            if isinstance(found, str) and found == self.language and self.minimum:
                score = field(fields, self.score)
            elif isinstance(found, str):
                score = float(found == self.language)
            else:
                score = found.get(self.language, 0.0)
        except (KeyError, AttributeError):
            raise MissingField(f"no language and score in {self.name} and {self.score} among {', '.join(list(fields)[:20])}") from None
        if not isinstance(score, (int, float)):
            raise MissingField(f"the score of {self.language} is {type(score).__name__}")
        return score > 0 and score >= self.minimum


def parse_where(name: str, word: str, value: str) -> Where:
    """`--where FIELD OP VALUE`. VALUE is JSON (3, true, "3", ["a","b"]) or else a string. Raises `DataError`."""
    if word not in OPERATORS:
        raise DataError(f"--where {name} {word} {value}: {word} is no comparison; use one of {' '.join(OPERATORS)}")
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = value
    if word == "in" and not isinstance(parsed, list):
        parsed = value.split(",")
    if word == "matches":
        parsed = value
        try:
            re.compile(parsed)
        except re.error as error:
            raise DataError(f"--where {name} {word} {value}: not a regular expression ({error}); mend it") from None
    return Where(name, word, parsed)
