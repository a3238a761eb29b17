"""Models of all mixers on the GPU against the CPU: loss and gradients of one step, layer-wise and head-wise, every option, documents.

What rounding may do was measured on the CPU. Rounding what goes into and comes out of the recurrences to TF32, as Triton multiplies
float32, moves the loss by 5e-6 and a parameter's gradient by 5e-3 (the most at first tokens, whose normalised outputs turn with the sign of
a product near zero); a step in bf16 moves them by 9e-5 and 0.13. Four times that is the bound, since kernels round inside too.
"""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu import cells
from tests.cpu.test_parity import MASKS, check_gradients
from tests.cpu.tiny import make_tiny_data, tiny_words
from tests.cpu.zoo import MIXED

ROOT = Path(__file__).parents[2]
SHAPE = ["run_dir=unused", "model.head_dim=64"]
CASES = [(model, mask) for model in MIXED for mask in MASKS]
BOUNDS = {"fp32": (2e-5, 2e-2), "bf16": (4e-4, 0.5)}


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """(model, mask) -> words of its recipe."""
    data = make_tiny_data(tmp_path_factory.mktemp("zoo"))
    return {case: tiny_words(data, *SHAPE, *MIXED[case[0]], *MASKS[case[1]]) for case in CASES}


@pytest.fixture(scope="module")
def on_the_cpu(words, tmp_path_factory) -> dict:
    """(loss, gradients) in float32 by case."""
    results = tmp_path_factory.mktemp("cpu") / "results"
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu.test_zoo", json.dumps([words[case] for case in CASES]), str(results)],
        cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "4"}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    return dict(zip(CASES, pickle.loads(results.read_bytes())))


def step(words: list[str]) -> tuple[float, dict]:
    loss, _, gradients = cells.loss_and_gradients(words)
    return loss, cells.assemble([gradients])


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("case", CASES, ids=[", ".join(case) for case in CASES])
def test_gpu_computes_what_the_cpu_does(words, on_the_cpu, case, precision):
    loss, gradients = step([*words[case], f"train.precision={precision}"])
    expected, exact = on_the_cpu[case]
    bound, bound_of_gradients = BOUNDS[precision]
    worst = check_gradients(gradients, exact, 1e9)
    print(f"{', '.join(case)}, {precision}: loss {abs(loss - expected):.1e}, gradients {worst:.1e}")
    assert abs(loss - expected) <= bound
    check_gradients(gradients, exact, bound_of_gradients)


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(pickle.dumps([step(words) for words in json.loads(sys.argv[1])]))
