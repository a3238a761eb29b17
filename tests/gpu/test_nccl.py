"""Models of all mixers over two GPUs: what each layout computes over NCCL is what one GPU computes, float32, loss and gradients.

Triton multiplies float32 in TF32, and under another layout it multiplies other tiles: the bounds are those of test_zoo.py. Heads of 16
channels, the narrowest that the kernels take: every layout has shapes of its own, and each compiles.
"""

import os
from pathlib import Path

import pytest
import torch

from tests.cpu import cells
from tests.cpu.parity_table import ParityTable
from tests.cpu.test_parity import MASKS, compare_layout
from tests.cpu.test_zoo_parity import ZOO_LAYOUTS
from tests.cpu.tiny import make_tiny_data, tiny_words
from tests.cpu.zoo import MIXED
from tests.gpu.test_zoo import BOUNDS
from tests.gpu.untuned import spare_autotuning

SHAPE = ["run_dir=unused", "model.head_dim=16"]
LAYOUTS = ["context 2", "context 2 by all-to-all", "tensor 2 + sequence", "pipeline 2 x virtual 2", "data 2", "tensor 2", "pipeline 2"]
MODELS = ["all mixers, HH", "all mixers, LH"]

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_tiny_data(tmp_path_factory.mktemp("nccl"))


@pytest.fixture(scope="module")
def note():
    """Notes a cell in the table of this module, which is written to the file that NCCL_TABLE names, if it is set."""
    table = ParityTable()

    def note(*cell) -> None:
        table.note(*cell)
        if path := os.environ.get("NCCL_TABLE"):
            Path(path).write_text(table.markdown("on two GPUs over NCCL", "2e-5 and 2e-2"))

    return note


@pytest.fixture(scope="module")
def one_gpu(gpus, data):
    """(model, mask) -> loss, parameters and gradients of one step on one GPU, computed once."""
    results = {}

    def of(model: str, mask: str):
        if (model, mask) not in results:
            [(loss, parameters, gradients)] = gpus.run(1, untuned_cell, tiny_words(data, *MIXED[model], *SHAPE, *MASKS[mask]))
            results[model, mask] = loss, cells.assemble([parameters]), cells.assemble([gradients])
        return results[model, mask]

    return of


def untuned_cell(words: list[str]):
    spare_autotuning()
    return cells.loss_and_gradients(words)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_over_nccl(gpus, data, one_gpu, note, model, layout, mask):
    words = tiny_words(data, *MIXED[model], *SHAPE, *ZOO_LAYOUTS[layout][1], *MASKS[mask])
    note(model, layout, mask, *compare_layout(gpus.run(2, untuned_cell, words), one_gpu(model, mask), BOUNDS["fp32"]))
