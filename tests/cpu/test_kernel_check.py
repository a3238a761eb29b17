"""The check of kernels lets right ones pass and names what is wrong with others; the CPU's forms stand in for the GPU's kernels."""

import sys

import pytest
import torch

from hybrid_megatron import platform
from hybrid_megatron.config import load_recipe
from hybrid_megatron.errors import RunError
from hybrid_megatron.model import kernels
from hybrid_megatron.model.attention.backends import first_that_runs
from hybrid_megatron.model.linear import linears
from hybrid_megatron.model.norm import norms
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.ops import gated_delta_rule
from hybrid_megatron.ops.gated_delta_rule import GatedDeltaRule
from hybrid_megatron.ops.kernel_check import kernel_problem
from hybrid_megatron.platform.device import transformer_engine_problem

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mixer", ["gla", "gdn", "kda", "lightning", "mamba2", "rwkv7"])
def test_right_kernels_pass(mixer, dtype):
    assert kernel_problem(mixer, 3, 16, dtype, CPU) is None


class _WrongInBackward(torch.autograd.Function):
    """The identity, whose gradient is a tenth too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 1.1 * gradient


@pytest.mark.parametrize(("place", "name"), [(1, "the gradient of k"), (3, "the gradient of g")])
def test_a_wrong_gradient_is_named(monkeypatch, place, name):
    def run(self, inputs, *, scale, **more):
        inputs = tuple(_WrongInBackward.apply(x) if i == place else x for i, x in enumerate(inputs))
        return gated_delta_rule.chunked(*inputs, scale=scale, **more)

    monkeypatch.setattr(GatedDeltaRule, "run", run)
    problem = kernel_problem("gdn", 2, 16, torch.bfloat16, CPU)
    assert "mixer gdn" in problem and name in problem and "1.0e-01" in problem


def test_a_refusal_and_a_nan_are_told(monkeypatch):
    def refuses(self, inputs, **more):
        raise RuntimeError("Triton 3.6.0 gives wrong gradients on Hopper\nand more")

    monkeypatch.setattr(GatedDeltaRule, "run", refuses)
    problem = kernel_problem("gdn", 2, 16, torch.bfloat16, CPU)
    assert "Triton 3.6.0 gives wrong gradients on Hopper; triton and" in problem and "pip install triton==3.7.1" in problem

    def is_not_a_number(self, inputs, **more):
        o, final = gated_delta_rule.chunked(*inputs, **more)
        return o * torch.nan, final

    monkeypatch.setattr(GatedDeltaRule, "run", is_not_a_number)
    assert "inf" in kernel_problem("gdn", 2, 16, torch.bfloat16, CPU)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Where flash and flex run, cudnn does not, and there is no table of tuned configurations."""
    answers = {"is_cuda": True, "device_name": "a GPU", "kernel_pair_problem": None, "transformer_engine_problem": None}
    for name, answer in answers.items():
        monkeypatch.setattr(platform, name, lambda answer=answer: answer)
    asked = []

    def runs(backend, *shape):
        asked.append(shape)
        return {"auto": "flash", "flash": "flash", "flex": "flex"}.get(backend)

    monkeypatch.setattr(kernels, "first_that_runs", runs)
    return asked


def plan_of(*words: str):
    config = load_recipe(["776m+rope+pretrain_4k", "data.train=unused", *words])
    return config, plan_layers(config)


def test_the_kernels_taken_are_told(as_on_a_gpu):
    told = kernels.kernels_taken(*plan_of("model.num_kv_heads=4", "parallel.tensor=2"))
    assert told == "linear layers by torch, norms by triton; attention by flash" and as_on_a_gpu == [
        (6, 2, 128, torch.bfloat16, platform.device())
    ]
    pattern = "pattern=[{mixer: gdn}, {heads: [{mixer: swa}, {mixer: attention, position: nope}]}]"
    told = kernels.kernels_taken(*plan_of(pattern, "model.attention.backend=flex"))
    assert told.startswith(
        "linear layers by torch, norms by triton; attention by flex; windows by flex; gdn by flash-linear-attention 0.6.0, no tuned "
        "configurations for a GPU: "
    )


def test_documents_take_flex_whatever_is_asked_for(as_on_a_gpu):
    of = plan_of("model.attention.backend=cudnn", "data.document_mask=true")
    assert kernels.kernels_taken(*of).endswith("; attention by flex") and kernels.check_kernels(*of) is None and as_on_a_gpu == []


def test_a_backend_that_does_not_run_is_refused(as_on_a_gpu):
    told = "backend=cudnn: it does not run on a GPU with 12 heads over 12 of keys and values, 128 channels each, in bf16; take "
    with pytest.raises(RunError, match=told):
        kernels.check_kernels(*plan_of("model.attention.backend=cudnn"))
    kernels.check_kernels(*plan_of("model.attention.backend=flash"))


TE = {"model.attention.backend": "te", "model.kernels.linear": "te", "model.kernels.norm": "te"}


def test_transformer_engine_is_told_of_where_it_is(as_on_a_gpu):
    assert kernels.kernels_taken(*plan_of("model.kernels.linear=te")) == "linear layers by te, norms by triton; attention by flash"
    assert kernels.check_kernels(*plan_of("model.kernels.linear=te", "model.kernels.norm=te")) is None


@pytest.mark.parametrize("settings", [*([f"{key}={value}"] for key, value in TE.items()), [f"{key}={value}" for key, value in TE.items()]])
def test_transformer_engine_is_refused_where_it_is_not(as_on_a_gpu, monkeypatch, settings):
    monkeypatch.setattr(platform, "transformer_engine_problem", transformer_engine_problem)
    monkeypatch.setitem(transformer_engine_problem.__globals__, "is_cuda", lambda: True)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)  # an import of it fails
    with pytest.raises(RunError) as told:
        kernels.check_kernels(*plan_of(*settings))
    [sentence] = str(told.value).splitlines()
    assert sentence.startswith(", ".join(settings) + ": importing transformer_engine.pytorch fails (ModuleNotFoundError: ")
    assert "install Transformer Engine" in sentence and "leave the settings out" in sentence


def test_a_cpu_has_no_transformer_engine():
    if platform.is_cuda():
        pytest.skip("there is a GPU")
    words = plan_of(*(f"{key}={value}" for key, value in TE.items()))
    assert kernels.transformer_engine_problem(words[0]) is None and kernels.check_kernels(*words) is None
    assert linears("te") == linears("torch") and norms("te") == norms("triton")


def test_nothing_is_told_or_refused_on_a_cpu():
    if platform.is_cuda():
        pytest.skip("there is a GPU")
    words = plan_of("model.attention.backend=cudnn")
    assert kernels.kernels_taken(*words) is None and kernels.check_kernels(*words) is None
    assert first_that_runs("auto", 4, 2, 16, torch.float32, CPU) == "cudnn", "the CPU's one kernel whatever its name"
