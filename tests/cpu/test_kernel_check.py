"""The check of kernels lets right ones pass and names what is wrong with others; the CPU's forms stand in for the GPU's kernels."""

import pytest
import torch

from hybrid_megatron.ops import gated_delta_rule
from hybrid_megatron.ops.gated_delta_rule import GatedDeltaRule
from hybrid_megatron.ops.kernel_check import kernel_problem

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
