"""What CPU tests share: living ranks, a tiny dataset, a tiny recipe."""

import os
import signal
from pathlib import Path

import pytest

from tests.cpu.parity_table import ParityTable
from tests.cpu.ranks import Ranks
from tests.cpu.tiny import make_tiny_data


os.environ.setdefault("HYBRID_MEGATRON_ALLOW_CPU", "yes")  # also in a job that has GPUs
# What runs in the background of a script ignores it, and so would all that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (
    "test_life.py", "test_resume.py", "test_plan.py", "test_plan_memory.py", "test_recipes.py", "test_longce.py", "test_evaluate.py",
    "test_init_from.py", "test_bad_input.py", "test_interruptions.py", "test_mixers.py", "test_zoo_parity.py", "test_triton_kernels.py",
    "test_state_passing.py", "test_full_disk.py", "test_preflight.py", "test_parity.py", "test_stability.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: files are shared out among processes in this order (make test says so to xdist, which would begin with those
    of most tests), and none should be left with a long one at the end."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


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
