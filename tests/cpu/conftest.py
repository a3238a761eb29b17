"""What CPU tests share: living ranks, a tiny dataset, a tiny recipe."""

import os
from pathlib import Path

import pytest

from tests.cpu.parity_table import ParityTable
from tests.cpu.ranks import Ranks
from tests.cpu.tiny import make_tiny_data


@pytest.fixture(scope="session")
def ranks():
    """Four living processes."""
    group = Ranks(4)
    yield group
    group.close()


@pytest.fixture(scope="session")
def parity_table():
    """What the parity tests measure; written as Markdown to the file that PARITY_TABLE names, if it is set."""
    table = ParityTable()
    yield table
    if path := os.environ.get("PARITY_TABLE"):
        Path(path).write_text(table.markdown())


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    """Folder with `train` and `valid` datasets of 256 words, their manifests and index maps."""
    return make_tiny_data(tmp_path_factory.mktemp("tiny_data"))
