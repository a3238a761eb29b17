"""Counts as people write them: 4096, 10_240, 10,240, 1.5M, 50B; and what is told in words."""

import re
from fractions import Fraction

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_COUNT = re.compile(r"(\d+(?:[_,]\d+)*(?:\.\d+)?)([KMBT]?)", re.ASCII | re.IGNORECASE)


def parse_count(word: str) -> int:
    """A whole number; K, M, B and T behind it are powers of 1,000. Raises ValueError for anything else, 1.0005K too."""
    match = _COUNT.fullmatch(word)
    value = Fraction(re.sub("[_,]", "", match[1])) * _UNITS[match[2].upper()] if match else Fraction(1, 2)
    if value.denominator != 1:
        raise ValueError(f"{word} is not a whole number such as 4096, 1.5M or 50B")
    return int(value)


def human_count(value: int) -> str:
    """52.5B and the like, rounded to three digits: for reading, not for parsing."""
    unit, size = next((each for each in _UNITS.items() if value < 999.5 * each[1]), ("T", _UNITS["T"]))
    return f"{value / size:.3g}{unit}"


def human_hours(hours: float) -> str:
    """3.5 hours, 12 minutes, less than a minute."""
    if hours >= 1:
        return f"{hours:,.1f} hours"
    minutes = round(60 * hours)
    return plural(minutes, "minute") if minutes else "less than a minute"


def plural(count: int, thing: str) -> str:
    """1 GPU, 1,024 GPUs."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"
