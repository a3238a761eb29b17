"""Copies rows of heads between layouts: on CUDA a Triton kernel that moves each row as a whole, whatever the strides between rows. Torch's
copy of such tensors computes an address for every element and reaches a third of the memory's speed."""

import torch
from torch import Tensor


def copy_rows(source: Tensor, target: Tensor) -> None:
    """source [b, s, n, d] into target [b, s, n, d], a view whose last dimension is dense."""
    if target.is_cuda:
        from hybrid_megatron.ops.kernels.row_copy import copy

        copy(source, target)
    else:
        target.copy_(source)


def batch_first(x: Tensor) -> Tensor:
    """x [b, s, n, ...] as FLA's kernels take it, without gaps in this order: itself, or a copy."""
    if x.is_contiguous():
        return x
    return _BatchFirst.apply(x) if x.is_cuda and x.dim() == 4 else x.contiguous()


class _BatchFirst(torch.autograd.Function):
    """The gradient stays as it lies."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        copy_rows(x, out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad
