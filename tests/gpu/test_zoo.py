"""Models of all mixers on the GPU against the CPU: twenty steps, layer-wise and head-wise, every option, whole samples and documents.

The bounds are those of test_cpu_gpu.py, for the same reasons: 6e-4 for float32, where Triton multiplies in TF32, and 1e-2 for bf16.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cpu.tiny import make_tiny_data, tiny_words
from tests.cpu.zoo import MIXED
from tests.gpu.test_cpu_gpu import BF16, ROOT, TF32, losses
from tests.gpu.trainings import train_all

SHAPE = ["model.head_dim=64", "validation.interval_steps=100", "checkpoint.interval_steps=100"]
MASKS = {"whole": "data.document_mask=false", "documents": "data.document_mask=true"}
CASES = [(model, mask) for model in MIXED for mask in MASKS]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """(device, case, overrides) -> words of a recipe."""
    base = tmp_path_factory.mktemp("zoo")
    data = base / "data"
    data.mkdir()
    make_tiny_data(data)

    def of(where: str, case: tuple[str, str], *overrides: str) -> list[str]:
        run_dir = base / f"{where}_{CASES.index(case)}"
        return tiny_words(data, f"run_dir={run_dir}", *SHAPE, *MIXED[case[0]], MASKS[case[1]], *overrides)

    return of


@pytest.fixture(scope="module")
def on_the_cpu(words, tmp_path_factory) -> dict[tuple[str, str], torch.Tensor]:
    """Losses in float32 by case."""
    recipes = [words("cpu", case) for case in CASES]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu.trainings", json.dumps(recipes)],
        cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "4"}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    folders = [Path(next(word for word in recipe if word.startswith("run_dir=")).removeprefix("run_dir=")) for recipe in recipes]
    return {case: losses(folder) for case, folder in zip(CASES, folders)}


@pytest.mark.parametrize(("precision", "bound"), [("bf16", BF16), ("fp32", TF32)])
@pytest.mark.parametrize("case", CASES, ids=[", ".join(case) for case in CASES])
def test_gpu_trains_as_the_cpu(words, on_the_cpu, case, precision, bound):
    [folder] = train_all([words(precision, case, f"train.precision={precision}")])
    difference = (losses(folder) - on_the_cpu[case]).abs()
    print(case, precision, f"{float(difference.max()):.2e}")
    assert float(difference.max()) <= bound, difference
    assert float(on_the_cpu[case][-1]) < float(on_the_cpu[case][0]) - 0.15, "it learns"
