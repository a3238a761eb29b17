"""What the commands' arguments have in common: their types."""

import argparse
from collections.abc import Callable


def count(least: int) -> Callable[[str], int]:
    """A whole number of at least `least`."""

    def parse(word: str) -> int:
        if not word.isascii() or not word.isdigit() or int(word) < least:
            raise argparse.ArgumentTypeError(f"{word} is not a whole number of at least {least}")
        return int(word)

    return parse


def fraction(ends: bool) -> Callable[[str], float]:
    """A number from 0 to 1, with or without these two."""

    def parse(word: str) -> float:
        try:
            value = float(word)
        except ValueError:
            value = -1.0
        if not (0 <= value <= 1 if ends else 0 < value < 1):
            raise argparse.ArgumentTypeError(f"{word} is not a fraction {'from 0 to 1' if ends else 'between 0 and 1'}")
        return value

    return parse


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace other finished output")
