"""Which cells of a large matrix the quick tests take; `make test-all` takes the others too."""

import itertools
from collections.abc import Iterable

import pytest


def half_quick(*axes: Iterable) -> list:
    """All cells, those of the second colour of a chessboard marked slow: of any two neighbours along an axis one is quick."""
    cells = itertools.product(*(enumerate(axis) for axis in axes))
    return [_cell([name for _, name in cell], quick=sum(place for place, _ in cell) % 2 == 0) for cell in cells]


def quick_and_slow(quick: Iterable, slow: Iterable) -> list:
    """Cells of one axis, or of several as tuples."""
    return [*(_cell(cell, quick=True) for cell in quick), *(_cell(cell, quick=False) for cell in slow)]


def _cell(values, quick: bool):
    return pytest.param(*(values if isinstance(values, list | tuple) else [values]), marks=() if quick else pytest.mark.slow)
