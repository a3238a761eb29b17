"""The output stage of linear mixers: the RMSNorm of each head's row times the output gate. Keeps its inputs alone.

On CUDA one Triton kernel each way: what torch.compile made of it walked rows that lie batch first and rows that lie sequence first with one
order of loops, and took two kernels and twice the time backward.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.ops.by_kernel import by_kernel

GATES = {"sigmoid": torch.sigmoid, "silu": F.silu}


def gated_norm(o: Tensor, weight: Tensor, z: Tensor, eps: float, gate: str) -> Tensor:
    """o / rms(o) * weight * gate(z) for o, z [b, s, n, d] and weight [d]; statistics in float32 or wider, in the type of o.

    From the kernel it lies sequence first, as the output projection takes it. The gradient of o lies batch first, that of z as z does.
    """
    if by_kernel(o):
        from hybrid_megatron.ops.kernels.gated_norm import GatedNorm

        return GatedNorm.apply(o, weight, z, eps, gate)
    return F.rms_norm(o, weight.shape, weight, eps) * GATES[gate](z)
