"""Which tensors our own Triton kernels compute with."""

import torch
from torch import Tensor


def by_kernel(x: Tensor) -> bool:
    """Those on CUDA; float64 is for references, which torch computes."""
    return x.is_cuda and x.dtype is not torch.float64
