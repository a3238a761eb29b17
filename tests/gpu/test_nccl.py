"""Models of all mixers over two GPUs: what each layout computes over NCCL is what one GPU computes, float32, loss and gradients.

Nothing multiplies in TF32 here, so the layouts differ by the order of sums alone, and the bounds are those of the CPU's parity tests.
"""

import os

import pytest
import torch

from tests.cpu import cells
from tests.cpu.parity_table import ParityTable
from tests.cpu.ranks import Ranks
from tests.cpu.test_parity import MASKS, compare_layout
from tests.cpu.test_zoo_parity import ZOO_LAYOUTS
from tests.cpu.tiny import make_tiny_data, tiny_words
from tests.cpu.zoo import MIXED

SHAPE = ["model.head_dim=64", "model.hidden_size=64"]
LAYOUTS = [name for name, (size, _) in ZOO_LAYOUTS.items() if size == 2]

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def gpus():
    """Two living processes, a GPU each."""
    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # taken over by the processes
    group = Ranks(2)
    del os.environ["TRITON_F32_DEFAULT"]
    yield group
    group.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_tiny_data(tmp_path_factory.mktemp("nccl"))


@pytest.fixture(scope="module")
def table():
    """Written as Markdown to the file that NCCL_TABLE names, if it is set."""
    table = ParityTable()
    yield table
    if path := os.environ.get("NCCL_TABLE"):
        with open(path, "w") as file:
            file.write(table.markdown())


@pytest.fixture(scope="module")
def one_gpu(gpus, data):
    """(model, mask) -> loss, parameters and gradients of one step on one GPU, computed once."""
    results = {}

    def of(model: str, mask: str):
        if (model, mask) not in results:
            words = tiny_words(data, "run_dir=unused", *MIXED[model], *SHAPE, *MASKS[mask])
            [(loss, parameters, gradients)] = gpus.run(1, untuned_cell, words)
            results[model, mask] = loss, cells.assemble([parameters]), cells.assemble([gradients])
        return results[model, mask]

    return of


def untuned_cell(words: list[str]):
    from tests.gpu.untuned import spare_autotuning

    spare_autotuning()
    return cells.loss_and_gradients(words)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MIXED)
def test_layout_over_nccl(gpus, data, one_gpu, table, model, layout, mask):
    words = tiny_words(data, "run_dir=unused", *MIXED[model], *SHAPE, *ZOO_LAYOUTS[layout][1], *MASKS[mask])
    table.note(model, layout, mask, *compare_layout(gpus.run(2, untuned_cell, words), one_gpu(model, mask)))
