"""What the commands' arguments have in common: their types, and errors in one sentence."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hybrid_megatron.quantities import parse_count


class Parser(argparse.ArgumentParser):
    """A mistake is one line `error: ...` and exit code 2, without the usage in front of it."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def count(least: int) -> Callable[[str], int]:
    """A whole number, in any notation of `parse_count`."""

    def parse(word: str) -> int:
        try:
            value = parse_count(word)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{word} is not a whole number of at least {least}, such as 4096, 1.5M or 50B")
        return value

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


def dataset(word: str) -> Path:
    """The path of a dataset, with or without `.bin`: so `shards-*/documents.bin` names many."""
    return Path(word.removesuffix(".bin"))


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace other finished output")
