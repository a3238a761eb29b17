"""SiLU and then the L2 norm of each head's row, as Gated DeltaNet has it for q and k (arXiv 2412.06464), kept as its input alone."""

import torch
import torch.nn.functional as F
from torch import Tensor


def unit_silu(x: Tensor) -> Tensor:
    """SiLU(x) / ||SiLU(x)|| over the last dimension of x [b, s, n, d], in float32 or wider, in the type of x.

    On CUDA one Triton kernel each way.
    """
    if x.is_cuda and x.dtype is not torch.float64:
        from hybrid_megatron.ops.unit_silu_kernels import UnitSiLU

        return UnitSiLU.apply(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.normalize(F.silu(wide), dim=-1).to(x.dtype)
