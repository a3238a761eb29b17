"""Small functions of tensors (activations, norms of heads, gates) as few kernels on CUDA, by torch.compile.

Forward and backward are compiled each by itself, and the backward pass computes the function again from its inputs: they alone are kept.
On a CPU, where compiling takes longer than such functions ever do, they run as they stand.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

_MOST_SHAPES = 64  # kept by torch.compile, whose own 8 are few for layers and head groups of many kinds


def fused(function: Callable) -> Callable:
    """`function(*tensors, **constants)` -> a tensor or a tuple of them; differentiable by every tensor that asks for it."""

    @functools.cache
    def pair(constants: tuple) -> tuple[Callable, Callable]:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_SHAPES)
        forward = functools.partial(function, **dict(constants))

        def backward(gradients, *tensors):
            return torch.func.vjp(forward, *tensors)[1](gradients)

        return torch.compile(forward, fullgraph=True), torch.compile(backward, fullgraph=True)

    @functools.wraps(function)
    def run(*tensors: Tensor, **constants):
        if not tensors[0].is_cuda:
            return function(*tensors, **constants)
        return _FromInputs.apply(*pair(tuple(sorted(constants.items()))), *tensors)

    return run


class _FromInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward, backward, *tensors):
        ctx.backward_of = backward
        ctx.save_for_backward(*tensors)
        return forward(*tensors)

    @staticmethod
    def backward(ctx, *gradients):
        found = ctx.backward_of(gradients[0] if len(gradients) == 1 else gradients, *ctx.saved_tensors)
        return None, None, *found
