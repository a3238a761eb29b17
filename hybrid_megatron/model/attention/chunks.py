"""The outputs of attention over the chunks of a sample that one rank has, as the output projection takes them."""

import torch
from torch import Tensor


def joined(outputs: list[Tensor]) -> Tensor:
    """[b, n, s, d] of each chunk -> [b, s, n, d] of all; of several, sequence first in memory, as kernels write that of one."""
    if len(outputs) == 1:
        return outputs[0].transpose(1, 2)
    return torch.cat([o.permute(2, 0, 1, 3) for o in outputs]).transpose(0, 1)
