"""Matrix products whose result is wider than their factors; CUDA accumulates in float32 anyway."""

import torch
from torch import Tensor


def matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b accumulated and returned in `dtype`."""
    if a.dtype == dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else (a.to(dtype) @ b.to(dtype))


def add_matmul_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, accumulated in total's dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
