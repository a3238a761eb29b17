"""The platform: megatron-core on a machine without CUDA, and what is known about the device."""

import importlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hybrid_megatron.platform as platform
from hybrid_megatron.platform import cpu_backend, module_view
from hybrid_megatron.platform.device import kernel_pair_problem_of, peak_flops_of
from tests.cpu import record_cuda_assumptions as cuda_assumptions

ROOT = Path(__file__).resolve().parents[2]
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU backend is for machines without CUDA")


# ---- the inventory ---------------------------------------------------------------------------------------------------------------


def test_every_cuda_assumption_of_megatron_core_is_recorded():
    problems = cuda_assumptions.compare(cuda_assumptions.inventory(), cuda_assumptions.recorded())
    assert not problems, (
        "\n".join(problems) + "\nRead each line (does a run reach it on a CPU, does platform/cpu_backend.py answer it?), "
        "then record the inventory anew: python -m tests.cpu.record_cuda_assumptions"
    )


def test_inventory_names_a_new_line_and_a_lost_one():
    source = '"""Says torch.cuda."""\n# torch.cuda\nx = torch.zeros(1,   device="cuda")\ny = x.cuda()\nz = x.cpu()\nname = "cuda_graph"\n'
    found = {"a.py": cuda_assumptions.assumptions_in(source)}
    assert found["a.py"] == {'x = torch.zeros(1, device="cuda")': 1, "y = x.cuda()": 1}
    known = {"a.py": cuda_assumptions.assumptions_in('y = x.cuda()\nw = "torch.cuda.FloatTensor"\n'), "not_loaded.py": found["a.py"]}
    assert cuda_assumptions.compare(found, known) == [
        'a.py: not recorded: x = torch.zeros(1, device="cuda")',
        'a.py: recorded, but gone: w = "torch.cuda.FloatTensor"',
    ]
    twice = {"a.py": cuda_assumptions.assumptions_in("y = x.cuda()\ny = x.cuda()\n")}
    once = {"a.py": cuda_assumptions.assumptions_in("y = x.cuda()\n")}
    assert cuda_assumptions.compare(twice, once) == ["a.py: not recorded: y = x.cuda()"]


def test_record_belongs_to_the_pinned_megatron_core():
    version = json.loads(cuda_assumptions.RECORD.read_text())["megatron-core"]
    assert f"megatron-core=={version}" in (ROOT / "pyproject.toml").read_text()


# ---- what megatron-core sees, and what everybody else sees -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen():
    """`torch` as a module of megatron-core sees it."""
    return importlib.import_module("megatron.core.tensor_parallel.mappings").torch


@without_cuda
def test_only_megatron_core_sees_the_replacements(seen):
    assert seen is not torch and seen.nn is torch.nn and seen.float32 is torch.float32
    assert not seen.cuda.is_available()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.cuda.current_device()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1).cuda()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")
    for name in ("megatron.core.utils", "megatron.core.optimizer.optimizer", "megatron.core.pipeline_parallel.schedules"):
        assert importlib.import_module(name).torch is seen


@without_cuda
def test_installing_again_changes_nothing():
    before = (torch.Tensor.type, torch.Tensor.cuda, list(sys.meta_path))
    assert cpu_backend.install() is True
    assert (torch.Tensor.type, torch.Tensor.cuda, list(sys.meta_path)) == before


def test_nothing_is_changed_where_there_is_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu_backend, "_installed", False)
    before = (torch.Tensor.type, torch.Tensor.cuda, list(sys.meta_path))
    assert cpu_backend.install() is False
    assert (torch.Tensor.type, torch.Tensor.cuda, list(sys.meta_path)) == before


def test_a_replacement_that_does_not_exist_cannot_be_left_out():
    with pytest.raises(AssertionError, match="no such replacement: .'strems'"):
        cpu_backend.install(leave_out=["strems"])


def test_import_hook_reaches_modules_before_and_after(tmp_path, monkeypatch):
    package = tmp_path / "hooked_package"
    package.mkdir()
    for name in ("__init__", "early", "late"):
        (package / f"{name}.py").write_text(f"import math\nroot = math.sqrt(4)\nimported_as = {name!r}\n")
    (tmp_path / "hooked_package_too.py").write_text("import math\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    importlib.import_module("hooked_package.early")
    seen = []
    hook = module_view.ImportHook("hooked_package", lambda module: seen.append((module.__name__, module.root)))
    assert sorted(hook.install()) == ["hooked_package", "hooked_package.early"]
    importlib.import_module("hooked_package_too")
    importlib.import_module("hooked_package.late")
    assert sorted(seen) == [("hooked_package", 2.0), ("hooked_package.early", 2.0), ("hooked_package.late", 2.0)]


# ---- each replacement ------------------------------------------------------------------------------------------------------------


@without_cuda
def test_current_device_and_streams(seen):
    assert seen.cuda.current_device() == torch.device("cpu")
    stream = seen.cuda.current_stream()
    stream.wait_stream(seen.cuda.current_stream())
    stream.wait_event(None)
    seen.cuda.synchronize()


@without_cuda
@pytest.mark.parametrize("name", ["cuda", "cuda:0", torch.device("cuda")])
def test_factories_read_cuda_as_cpu(seen, name):
    like = torch.ones(2)
    made = [
        seen.tensor([1.0, 2.0], device=name),
        seen.zeros(2, device=name),
        seen.ones(2, device=name),
        seen.empty(2, device=name, pin_memory=True),
        seen.full((2,), 3.0, device=name),
        seen.arange(2.0, device=name),
        seen.zeros_like(like, device=name),
        seen.ones_like(like, device=name),
        seen.empty_like(like, device=name),
    ]
    assert len(made) == len(cpu_backend._FACTORIES)
    assert all(tensor.device.type == "cpu" and tensor.shape == (2,) and tensor.dtype == torch.float32 for tensor in made)
    assert made[0].tolist() == [1, 2] and made[4].tolist() == [3, 3] and made[5].tolist() == [0, 1]
    assert seen.empty(1, device="meta").device.type == "meta"
    assert seen.zeros(2, dtype=torch.int64).dtype == torch.int64


@without_cuda
def test_tensor_type_equals_both_spellings_of_its_own_type_only():
    for dtype, name in [(torch.float32, "FloatTensor"), (torch.bfloat16, "BFloat16Tensor"), (torch.float16, "HalfTensor")]:
        kind = torch.zeros(1, dtype=dtype).type()
        assert kind == f"torch.{name}" and kind == f"torch.cuda.{name}" and f"torch.cuda.{name}" == kind
        assert kind in ["torch.cuda.IntTensor", f"torch.cuda.{name}"] and kind not in ["torch.cuda.IntTensor"]
        assert not kind != f"torch.cuda.{name}" and kind != "torch.cuda.IntTensor" and kind != 1
        assert str(kind) == f"torch.{name}" and {f"torch.{name}": 7}[kind] == 7
    assert torch.zeros(1).type(torch.float64).dtype == torch.float64
    assert torch.zeros(1).type("torch.IntTensor").dtype == torch.int32


@without_cuda
def test_tensor_cuda_is_the_tensor_for_megatron_core_only():
    tensor = torch.ones(2)
    caller = {"__name__": "megatron.core.somewhere", "tensor": tensor}
    assert eval("tensor.cuda(non_blocking=True)", caller) is tensor
    with pytest.raises((RuntimeError, AssertionError)):
        eval("tensor.cuda()", caller | {"__name__": "somewhere.else"})


@without_cuda
def test_rng_tracker_forks_and_restores(caplog):
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    expected = {seed: torch.rand(4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 11, 22)}
    state = torch.get_rng_state()
    try:
        tracker = random.CudaRNGStatesTracker()
        torch.manual_seed(1)
        tracker.add("a", 11)
        tracker.add("b", 22)
        with caplog.at_level(logging.WARNING, logger=random.__name__):
            outer_first = torch.rand(2)
            with tracker.fork("a"):
                a_first = torch.rand(2)
                with tracker.fork("b"):
                    b = torch.rand(4)
                a_second = torch.rand(1)
            outer_second = torch.rand(2)
            saved = tracker.get_states()
            with tracker.fork("a"):
                a_third = torch.rand(1)
            tracker.set_states(saved)
            with tracker.fork("a"):
                a_third_again = torch.rand(1)
        # Each stream runs on as if the others did not exist.
        assert torch.equal(torch.cat([outer_first, outer_second]), expected[1])
        assert torch.equal(torch.cat([a_first, a_second, a_third]), expected[11])
        assert torch.equal(b, expected[22])
        assert torch.equal(a_third, a_third_again)
        assert not caplog.records
        with pytest.raises(Exception, match="seed 11 already exists"):
            tracker.add("c", 11)
        with pytest.raises(Exception, match="rng state d is not added"), tracker.fork("d"):
            pass
    finally:
        torch.set_rng_state(state)


@without_cuda
def test_rng_of_the_gpu_is_that_of_the_cpu(seen):
    state = torch.get_rng_state()
    try:
        seen.cuda.manual_seed(5)
        assert torch.initial_seed() == 5
        first = torch.rand(3)
        assert torch.equal(first, torch.rand(3, generator=torch.Generator().manual_seed(5)))
        middle = seen.cuda.get_rng_state()
        second = torch.rand(3)
        seen.cuda.set_rng_state(middle)
        assert torch.equal(torch.rand(3), second)
    finally:
        torch.set_rng_state(state)


@without_cuda
def test_recomputed_dropout_draws_the_same_numbers():
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    state = torch.get_rng_state()
    try:
        torch.manual_seed(3)
        x = torch.ones(64, requires_grad=True)
        out = random.checkpoint(lambda t: torch.nn.functional.dropout(t, 0.5), False, x)
        out.sum().backward()
        # The gradient comes from the second drawing, the output from the first.
        assert torch.equal(x.grad, out.detach()) and 0 < (out == 0).sum() < 64
    finally:
        torch.set_rng_state(state)


@without_cuda
def test_megatron_core_compiles_nothing_and_torch_compile_is_left_alone():
    fused = importlib.import_module("megatron.core.fusions.fused_bias_dropout")
    assert not hasattr(fused.bias_dropout_add_fused_train, "_torchdynamo_orig_callable")
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    assert hasattr(compiled, "_torchdynamo_orig_callable") and compiled(torch.ones(1)).item() == 2


@without_cuda
def test_megatron_core_imported_first_is_mended_with_a_warning():
    program = (
        "import logging; logging.basicConfig(); from megatron.core.tensor_parallel import mappings, random\n"
        "import hybrid_megatron.platform; print(mappings.torch.cuda.current_device()); random.CudaRNGStatesTracker().add('a', 1)"
    )
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.strip() == "cpu", result.stderr
    assert "megatron.core was imported before hybrid_megatron.platform" in result.stderr


# ---- each replacement is needed --------------------------------------------------------------------------------------------------


def _step(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run the tiny step of megatron_step.py in two processes."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(ROOT / "tests" / "cpu" / "megatron_step.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, script, str(folder), *arguments], capture_output=True, text=True, env=environment, timeout=300)


@without_cuda
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp", "pp"])
def test_step_and_checkpoint_with_the_whole_backend(tmp_path, layout):
    result = _step(tmp_path, "--layout", layout)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("done") == 2 and (tmp_path / "metadata.json").exists()


# The replacement left out, and what the failing run must show: the place in megatron-core that needs it, or its complaint.
NEEDED = [
    ("current_device", "dp", "tensor_parallel/layers.py"),
    ("current_stream", "dp", "distributed/param_and_grad_buffer.py"),
    ("synchronize", "dp", "dist_checkpointing/strategies/async_utils.py"),
    ("synchronize", "pp", "pipeline_parallel/p2p_communication.py"),
    ("factories", "dp", "optimizer/optimizer.py"),
    ("tensor_type", "dp", "Received torch.FloatTensor"),
    ("tensor_cuda", "dp", "optimizer/distrib_optimizer.py"),
    ("rng", "dp", "tensor_parallel/random.py"),
    ("jit_off", "dp", "megatron-core compiled"),
]


@without_cuda
@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout", "sign"), NEEDED)
def test_step_fails_without(tmp_path, name, layout, sign):
    result = _step(tmp_path, "--layout", layout, "--leave-out", name)
    assert result.returncode != 0 and sign in result.stderr, result.stdout + result.stderr


def test_each_replacement_is_proved_needed_and_explained():
    assert {name for name, *_ in NEEDED} == set(cpu_backend.REPLACEMENTS)
    for replacement in cpu_backend.REPLACEMENTS.values():
        assert ".py:" in replacement.__doc__, f"{replacement.__name__} does not say which line of megatron-core needs it"


# ---- device facts ----------------------------------------------------------------------------------------------------------------


@without_cuda
def test_facts_of_a_cpu():
    assert platform.device() == torch.device("cpu") and platform.backend() == "gloo" and not platform.is_cuda()
    assert platform.peak_flops() is None and platform.kernel_pair_problem() is None
    platform.synchronize()


@without_cuda
def test_peak_memory_follows_an_allocation_and_stays():
    before = platform.peak_memory_gib()
    block = bytearray(int((before + 0.5) * 2**30))  # more than whatever this process has held
    block[:: 1 << 12] = bytes(len(block[:: 1 << 12]))
    peak = platform.peak_memory_gib()
    assert before + 0.4 < peak < 2 * before + 0.7
    del block
    assert platform.peak_memory_gib() == peak


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peak_flops_by_name(name, peak):
    assert peak_flops_of(name) == peak


@pytest.mark.parametrize(
    ("version", "capability", "wrong"),
    [
        ("3.3.1", (9, 0), False),
        ("3.4.0", (9, 0), True),
        ("3.6.0", (9, 0), True),
        ("3.7.0", (9, 0), True),
        ("3.7.1", (9, 0), False),
        ("3.10.0", (9, 0), False),
        ("3.6.0", (8, 0), False),
        ("3.6.0", (10, 0), False),
    ],
)
def test_kernel_pair(version, capability, wrong):
    problem = kernel_pair_problem_of(version, capability, "NVIDIA H200")
    assert (problem is not None) == wrong
    if problem:
        assert version in problem and "NVIDIA H200" in problem and "3.7.1" in problem


@pytest.mark.parametrize(
    ("named", "count", "seen"),
    [(None, 2, ["0", "1"]), ("", 0, []), ("4,GPU-7", 2, ["4", "GPU-7"]), ("3,9,5", 1, ["3"])],  # torch stops at the first it does not know
)
def test_visible_devices(monkeypatch, named, count, seen):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert platform.visible_devices() == seen


@pytest.mark.parametrize("processes, share", [(None, 6), ("1", 6), ("2", 3), ("4", 1), ("8", 1)])
def test_cores_are_shared_with_the_processes_of_the_node(monkeypatch, processes, share):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if processes is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert platform.cores() == share
