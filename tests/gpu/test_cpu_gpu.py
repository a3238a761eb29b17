"""The same small recipe on the CPU and on the GPU: twenty steps of a four-layer hybrid, every kernel of the real path.

float32 is compared twice. With TRITON_F32_DEFAULT=ieee nothing multiplies in TF32 (torch's matrix products do not by default), so CPU and
GPU differ by the order of sums alone: another chunk length of the delta rule on the CPU moves these losses by 2e-7 to 1e-6, two layouts
differ by up to 1e-5, and that is the bound. As users run it, Triton multiplies float32 in TF32 inside the delta rule: rounding q, k, v,
o and their gradients so on the CPU moves the losses by 6e-5; ten times that is the bound, since the kernels round inner products too.
bf16 on the CPU differs from float32 there by 9e-4; ten times that bounds bf16 on the GPU, whose kernels round more.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cpu.tiny import make_tiny_data, tiny_words
from tests.gpu.trainings import train_all

ROOT = Path(__file__).parents[2]
STEPS = 20
TF32, BF16 = 6e-4, 1e-2
# Head dim 64: what the GPU's kernels are made for.
SHAPE = ["model.head_dim=64", "checkpoint.interval_steps=10"]
MASK = "data.document_mask=true"


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> torch.Tensor:
    values = torch.tensor([line["loss"] for line in metrics(folder)], dtype=torch.float64)
    assert len(values) == STEPS and values.isfinite().all()
    return values


def start(recipes: list[list[str]], log: Path, **environment: str) -> subprocess.Popen:
    with open(log, "w") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.trainings", json.dumps(recipes)],
            cwd=ROOT, env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Callable[..., list[str]]:
    """(name of a run folder, overrides) -> words of its recipe."""
    base = tmp_path_factory.mktemp("cpu_gpu")
    data = base / "data"
    data.mkdir()
    make_tiny_data(data)
    return lambda name, *overrides: tiny_words(data, f"run_dir={base / name}", *SHAPE, *overrides)


@pytest.fixture(scope="module")
def runs(words, tmp_path_factory) -> dict[str, Path]:
    """Finished float32 run folders by name."""
    logs = tmp_path_factory.mktemp("logs")
    cpu = start([words("cpu"), words("cpu_mask", MASK)], logs / "cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="2")
    ieee = start([words("ieee"), words("ieee_mask", MASK)], logs / "ieee", TRITON_F32_DEFAULT="ieee")
    try:
        assert not torch.backends.cuda.matmul.allow_tf32 and torch.get_float32_matmul_precision() == "highest"
        folders = train_all([words("fp32"), words("fp32_again")])
        for process, name in ((cpu, "cpu"), (ieee, "ieee")):
            assert process.wait(timeout=300) == 0, (logs / name).read_text()[-4000:]
    finally:
        for process in (cpu, ieee):
            process.kill()
    folders += train_all([resumed_at_10(folders[0], words)])
    names = ("cpu", "cpu_mask", "ieee", "ieee_mask")
    return {folder.name: folder for folder in folders} | {name: folders[0].with_name(name) for name in names}


@pytest.fixture(scope="module")
def bf16_runs(words) -> dict[str, Path]:
    """Finished bf16 run folders by name."""
    precision = "train.precision=bf16"
    folders = train_all([words("bf16", precision), words("bf16_again", precision)])
    folders += train_all([[*resumed_at_10(folders[0], words), precision]])
    return {folder.name: folder for folder in folders}


def resumed_at_10(folder: Path, words: Callable[..., list[str]]) -> list[str]:
    """A copy of a finished run, as if killed after the checkpoint of step 10 was complete; the words to resume it."""
    copy = folder.with_name(f"{folder.name}_resumed")
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "checkpoints" / "step_00000020")
    return words(copy.name)


def device(folder: Path) -> str:
    return json.loads((folder / "events.jsonl").read_text().splitlines()[0])["device"]


def test_the_cpu_runs_on_the_cpu_and_the_gpu_on_the_gpu(runs):
    assert device(runs["cpu"]) == "CPU"
    assert device(runs["ieee"]) == device(runs["fp32"]) == torch.cuda.get_device_name()


def test_it_learns(runs):
    for name in ("cpu", "cpu_mask", "ieee", "ieee_mask", "fp32"):
        values = losses(runs[name])
        assert values[-1] < values[0] - 0.3, name


@pytest.mark.parametrize("mask", ["", "_mask"])
def test_float32_without_tf32_is_what_the_cpu_computes(runs, mask):
    difference = (losses(runs["ieee" + mask]) - losses(runs["cpu" + mask])).abs()
    print(difference)
    assert float(difference.max()) <= 1e-5, difference
    norms = [[line["grad_norm"] for line in metrics(runs[name + mask])] for name in ("ieee", "cpu")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    validation = [metrics(runs[name + mask])[-1]["validation_loss"] for name in ("ieee", "cpu")]
    assert abs(validation[0] - validation[1]) <= 1e-5


def test_float32_with_tritons_tf32(runs):
    difference = (losses(runs["fp32"]) - losses(runs["cpu"])).abs()
    print(difference)
    assert float(difference.max()) <= TF32, difference


def test_bf16(runs, bf16_runs):
    assert device(bf16_runs["bf16"]) == torch.cuda.get_device_name()
    difference = (losses(bf16_runs["bf16"]) - losses(runs["cpu"])).abs()
    print(difference)
    assert float(difference.max()) <= BF16, difference


def check_resumed(runs: dict[str, Path], name: str, bound: float) -> None:
    """Bitwise where the GPU repeats itself bitwise, which two whole runs show; else as near as the two are, and at least within `bound`."""
    begun = [json.loads(line) for line in (runs[f"{name}_resumed"] / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in begun if event["event"] == "start"] == [0, 10]
    whole, again, resumed = (losses(runs[each]) for each in (name, f"{name}_again", f"{name}_resumed"))
    print("repeats bitwise:", torch.equal(whole, again), "resumed differs by:", float((resumed - whole).abs().max()))
    if torch.equal(whole, again):
        assert torch.equal(resumed, whole)
    else:
        assert float((resumed - whole).abs().max()) <= max(10 * float((whole - again).abs().max()), bound)


def test_a_resumed_float32_run_goes_on_as_if_never_stopped(runs):
    check_resumed(runs, "fp32", 1e-5)


def test_a_resumed_bf16_run_goes_on_as_if_never_stopped(bf16_runs):
    check_resumed(bf16_runs, "bf16", BF16 / 100)
