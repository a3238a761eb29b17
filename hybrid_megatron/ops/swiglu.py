"""SwiGLU (Shazeer, 2020, arXiv 2002.05202) between the two projections of a feed-forward block: SiLU(gate) * up.

On CUDA one Triton kernel each way, which reads and writes every element once; what torch.compile makes of megatron-core's form took twice
as long backward.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.ops.by_kernel import by_kernel


def swiglu(x: Tensor) -> Tensor:
    """[..., 2 f] with the gate before the up projection -> [..., f]. Keeps its input alone for the backward pass."""
    return _SwiGLU.apply(x)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        if by_kernel(x):
            from hybrid_megatron.ops.kernels.swiglu import product

            return product(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if by_kernel(x):
            from hybrid_megatron.ops.kernels.swiglu import gradient

            return gradient(grad, x)
        return _by_definition(grad, x)


def _by_definition(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x."""
    gate, up = x.chunk(2, dim=-1)
    sigmoid = gate.sigmoid()
    return torch.cat((grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid), dim=-1)
