"""Models of all mixers over several GPUs: what each layout computes over NCCL is what one GPU computes, loss and gradients.

Triton multiplies float32 in TF32, and under another layout it multiplies other tiles: the bounds are those of test_zoo.py. Heads of 16
channels, the narrowest that the kernels take: every layout has shapes of its own, and each compiles.
"""

import json
import os

import pytest
import torch

from tests.cpu import cells
from tests.cpu.test_parity import MASKS, compare_layout
from tests.cpu.test_zoo_parity import ZOO_LAYOUTS
from tests.cpu.tiny import make_tiny_data, tiny_words
from tests.cpu.zoo import MIXED
from tests.gpu.test_zoo import BOUNDS
from tests.gpu.untuned import spare_autotuning

SHAPE = ["run_dir=unused", "model.head_dim=16"]
LAYOUTS = ZOO_LAYOUTS | {
    "tensor 2 + sequence, context 2, pipeline 2": (
        8, ["parallel.tensor=2", "parallel.sequence=true", "parallel.context=2", "parallel.pipeline=2"],
    ),
    "tensor 2 + sequence, context 2, data 2": (8, ["parallel.tensor=2", "parallel.sequence=true", "parallel.context=2"]),
}  # fmt: skip

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_tiny_data(tmp_path_factory.mktemp("nccl"))


def note(precision: str, *cell) -> None:
    """A line of the file that NCCL_CELLS names, if it is set: benchmarks/multi_gpu_table.py makes a table of them."""
    if path := os.environ.get("NCCL_CELLS"):
        with open(path, "a") as file:
            file.write(json.dumps([precision, *cell]) + "\n")


@pytest.fixture(scope="module")
def one_gpu(gpus, data):
    """(model, mask, precision) -> loss, parameters and gradients of one step on one GPU, computed once."""
    results = {}

    def of(model: str, mask: str, precision: str):
        if (model, mask, precision) not in results:
            words = tiny_words(data, *MIXED[model], *SHAPE, *MASKS[mask], f"train.precision={precision}")
            [(loss, parameters, gradients)] = gpus.run(1, untuned_cell, words)
            results[model, mask, precision] = loss, cells.assemble([parameters]), cells.assemble([gradients])
        return results[model, mask, precision]

    return of


def untuned_cell(words: list[str]):
    spare_autotuning()
    return cells.loss_and_gradients(words)


@pytest.mark.parametrize("model", MIXED)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_over_nccl(gpus, data, one_gpu, model, layout, precision, mask):
    size, overrides = LAYOUTS[layout]
    if gpus.size < size:
        pytest.skip(f"needs {size} GPUs")
    words = tiny_words(data, *MIXED[model], *SHAPE, *overrides, *MASKS[mask], f"train.precision={precision}")
    answers = gpus.run(size, untuned_cell, words)
    note(precision, model, layout, mask, *compare_layout(answers, one_gpu(model, mask, precision), BOUNDS[precision]))
