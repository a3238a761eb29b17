"""What CPU tests share: living ranks, a tiny dataset, a tiny recipe."""

from pathlib import Path

import pytest

from tests.cpu.ranks import Ranks
from tests.cpu.tiny import make_tiny_data


@pytest.fixture(scope="session")
def ranks():
    """Four living processes."""
    group = Ranks(4)
    yield group
    group.close()


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    """Folder with `train` and `valid` datasets of 256 words, their manifests and index maps."""
    return make_tiny_data(tmp_path_factory.mktemp("tiny_data"))
