"""Counts of tokens as people write them: 50B, 1.5M, 4096."""

import re
from decimal import Decimal

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_WORD = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?)([KMBT]?)", re.ASCII | re.IGNORECASE)


def parse_tokens(word: str) -> int:
    """`50B` -> 50_000_000_000. Units are powers of 1,000: K, M, B, T. Raises `ValueError` unless it is a whole number above zero."""
    match = _WORD.fullmatch(word.strip())
    if match is not None:
        count = Decimal(re.sub("[_,]", "", match[1])) * UNITS[match[2].upper()]
        if count > 0 and count == int(count):
            return int(count)
    raise ValueError(f"{word} is not a number of tokens; write a whole number above zero, as 4096, 1.5M or 50B")


def human_tokens(count: int) -> str:
    """52.5B tokens and the like, rounded to three digits: for reading, not for parsing."""
    for unit in ("", "K", "M", "B"):
        if count < 999.5 * UNITS[unit]:
            return f"{count / UNITS[unit]:.3g}{unit}"
    return f"{count / UNITS['T']:.3g}T"
