"""SiLU of heads' rows, alone or with the L2 norm of each row behind it, as Gated DeltaNet has it for q and k (arXiv 2412.06464). Both keep
their input alone. On CUDA one Triton kernel each way, for rows at any distance from each other; the result lies batch first, as FLA's
kernels take it, and the gradient as the input does."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.ops.by_kernel import by_kernel


def silu(x: Tensor) -> Tensor:
    """SiLU(x) for x [b, s, n, d], computed in float32 or wider, in the type of x."""
    if by_kernel(x):
        from hybrid_megatron.ops.kernels.silu import SiLU

        return SiLU.apply(x, False)
    return F.silu(x)


def unit_silu(x: Tensor) -> Tensor:
    """SiLU(x) / ||SiLU(x)|| over the last dimension of x [b, s, n, d], in float32 or wider, in the type of x."""
    if by_kernel(x):
        from hybrid_megatron.ops.kernels.silu import SiLU

        return SiLU.apply(x, True)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.normalize(F.silu(wide), dim=-1).to(x.dtype)
