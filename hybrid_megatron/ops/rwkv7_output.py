"""The output stage of RWKV-7 (Peng et al., 2025, arXiv 2503.14456): the layer norm of each head, the bonus of the token itself, the gate.

    (LayerNorm(o) weight + bias + (sum r k r_k) v) gate

per head; weight, bias and r_k of each channel. Keeps its inputs alone; on CUDA one Triton kernel each way.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.ops.by_kernel import by_kernel


def finished(o: Tensor, r: Tensor, k: Tensor, v: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, r_k: Tensor, *, eps: float) -> Tensor:
    """[b, s, n, d], in float32 or wider and then as o is; o, r, k, v [b, s, n, d], gate [b, s, n * d], the others [n * d].

    From the kernel it lies sequence first, as the output projection takes it, and the gradient of o batch first, as FLA's kernels do.
    """
    gate = gate.unflatten(-1, o.shape[2:])
    if by_kernel(o):
        from hybrid_megatron.ops.kernels.rwkv7_output import Finished

        return Finished.apply(o, r, k, v, gate, weight, bias, r_k, eps)
    return by_definition(o, r, k, v, gate, weight, bias, r_k, eps)


def by_definition(
    o: Tensor, r: Tensor, k: Tensor, v: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, r_k: Tensor, eps: float
) -> Tensor:
    """As `finished`, from gate [b, s, n, d]."""
    wide, heads = torch.promote_types(o.dtype, torch.float32), o.shape[2:]
    normal = F.layer_norm(o.to(wide), heads[1:], eps=eps) * weight.to(wide).view(heads) + bias.to(wide).view(heads)
    bonus = (r.to(wide) * k.to(wide) * r_k.to(wide).view(heads)).sum(-1, keepdim=True) * v.to(wide)
    return ((normal + bonus) * gate.to(wide)).to(o.dtype)
