"""A checkpoint written on some GPUs goes on on others: fewer, more, or with other sizes of tensor and pipeline parallelism, over NCCL.

Attention alone, in float32, which no GPU rounds to TF32 unless asked: twenty steps under one layout and ten under each of two give the same
losses. That every mixer's parameters find their places again is shown on the CPU (tests/cpu/test_resume.py).
"""

import pytest
import torch

from tests.cpu.runs import computed
from tests.cpu.test_resume import in_two_parts, straight
from tests.cpu.tiny import make_tiny_data
from tests.cpu.zoo import MATRIX
from tests.gpu.untuned import spare_autotuning

MODEL = [*MATRIX["attention rope + nope, HH"], "model.head_dim=16"]
MOVES = [
    ("data 2", "one process"),
    ("data 2", "tensor 2 + sequence"),
    ("tensor 2", "context 2"),
    ("pipeline 2 x virtual 2", "data 2"),
    ("one process", "pipeline 2"),
    ("data 4", "tensor 2 + sequence, context 2"),
    ("tensor 2 + sequence, data 2", "one process"),
]
LARGEST = 1e-5
"""Of the difference of two losses, in nats."""

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_tiny_data(tmp_path_factory.mktemp("reshard"))


@pytest.fixture(scope="module")
def undisturbed(gpus, data, tmp_path_factory) -> list[dict]:
    gpus.run(gpus.size, spare_autotuning)
    return computed(straight(gpus, data, tmp_path_factory.mktemp("straight") / "run", "one process", *MODEL))


@pytest.mark.parametrize("first, second", MOVES)
def test_goes_on_elsewhere(gpus, data, tmp_path, undisturbed, first, second):
    if gpus.size < 4 and any("4" in layout or "," in layout for layout in (first, second)):
        pytest.skip("needs four GPUs")
    lines = computed(in_two_parts(gpus, data, tmp_path / "run", first, second, *MODEL))
    assert len(lines) == len(undisturbed) == 20
    difference = max(abs(line["loss"] - other["loss"]) for line, other in zip(lines, undisturbed))
    print(f"{first} to {second}: largest difference of a loss {difference:.1e}")
    assert difference <= LARGEST
