"""What RWKV-7's recurrence takes (Peng et al., 2025, arXiv 2503.14456), from keys and what was projected for decay and rate:

    g = -e^(-1/2) sigmoid(decay + decay_bias)    rate = sigmoid(rate + rate_bias)    kk = k k_k / max(||k k_k||, 1e-12)
    k <- k (1 + (rate - 1) k_a)                  a = -kk                             b = kk rate

per head and channel, the length of k k_k over a head's channels. Keeps its inputs alone; on CUDA one Triton kernel each way.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.ops.by_kernel import by_kernel
from hybrid_megatron.ops.generalized_delta_rule import STRONGEST_GATE


def recurrence_inputs(
    k: Tensor, decay: Tensor, rate: Tensor, decay_bias: Tensor, rate_bias: Tensor, k_k: Tensor, k_a: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(k, g, a, b) [b, s, n, d] from k [b, s, n, d], decay and rate [b, s, n * d] and parameters [n * d]; biases in float32.

    g in float32 or wider, and all computed so; from the kernel they lie batch first, as FLA's kernels take them.
    """
    heads = k.shape[2:]
    decay, rate = decay.unflatten(-1, heads), rate.unflatten(-1, heads)
    if by_kernel(k):
        from hybrid_megatron.ops.kernels.rwkv7_inputs import RecurrenceInputs

        return RecurrenceInputs.apply(k, decay, rate, decay_bias, rate_bias, k_k, k_a)
    return by_definition(k, decay, rate, decay_bias, rate_bias, k_k, k_a)


def by_definition(
    k: Tensor, decay: Tensor, rate: Tensor, decay_bias: Tensor, rate_bias: Tensor, k_k: Tensor, k_a: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `recurrence_inputs`, from decay and rate [b, s, n, d]."""
    wide, heads = torch.promote_types(k.dtype, torch.float32), k.shape[2:]
    keys = k.to(wide)
    g = STRONGEST_GATE * (decay.to(wide) + decay_bias.view(heads)).sigmoid()
    rate = (rate.to(wide) + rate_bias.view(heads)).sigmoid()
    removed = F.normalize(keys * k_k.to(wide).view(heads), dim=-1)
    keys = keys * (1 + (rate - 1) * k_a.to(wide).view(heads))
    return keys.to(k.dtype), g, -removed.to(k.dtype), (removed * rate).to(k.dtype)
