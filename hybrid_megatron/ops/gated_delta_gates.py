"""Gates of Gated DeltaNet (Yang et al., 2024, arXiv 2412.06464): log gate g = -e^A softplus(a + dt) and beta = sigmoid(b), or twice that.

On CUDA one Triton kernel each way. There is little to compute; torch.compile's guards took longer than the kernels, on the host.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.ops.by_kernel import by_kernel


def log_gate_and_beta(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, largest_beta: int) -> tuple[Tensor, Tensor]:
    """(g, beta) [b, s, n], in float32 or wider, of a, b [b, s, n] as projected; A_log, dt_bias [n]. Keeps its inputs alone."""
    if by_kernel(a):
        from hybrid_megatron.ops.kernels.gated_delta_gates import Gates

        return Gates.apply(a, b, A_log, dt_bias, largest_beta)
    wide = torch.promote_types(a.dtype, torch.float32)
    return -A_log.exp() * F.softplus(a.to(wide) + dt_bias), largest_beta * b.to(wide).sigmoid()
