"""Inverse of unit lower triangular matrices, many small ones at once, by products alone.

torch.linalg.solve_triangular walks through a batch one matrix at a time, and on a CPU starts its threads for each.
"""

import torch
from torch import Tensor

BLOCK = 16


def inverse_unit_lower(strict: Tensor) -> Tensor:
    """(I + tril(strict, -1))^-1 for strict [..., c, c], c at most 16 or 16 times a power of two; the diagonal and above are ignored.

    Blocks of 16 by forward substitution, row after row, then doubled: with D and E the inverses of the diagonal blocks and B the block
    below them, the inverse is [[D, 0], [-E B D, E]]. As stable as substitution; powers of the matrix, also products alone, are not.
    """
    return _InverseUnitLower.apply(strict)


class _InverseUnitLower(torch.autograd.Function):
    @staticmethod
    def forward(ctx, strict: Tensor) -> Tensor:
        width = strict.shape[-1]
        block = min(BLOCK, width)
        assert width % block == 0 and (width // block).bit_count() == 1, f"matrices of {width} rows"
        inverse = torch.zeros_like(strict)
        starts = range(0, width, block)
        small = torch.stack([strict[..., s : s + block, s : s + block] for s in starts], dim=-3)
        solved = torch.eye(block, dtype=strict.dtype, device=strict.device).expand(small.shape).clone()
        for row in range(1, block):
            solved[..., row, :row] = -(small[..., row, None, :row] @ solved[..., :row, :row])[..., 0, :]
        for i, s in enumerate(starts):
            inverse[..., s : s + block, s : s + block] = solved[..., i, :, :]
        while block < width:
            for s in range(0, width, 2 * block):
                upper, lower = slice(s, s + block), slice(s + block, s + 2 * block)
                inverse[..., lower, upper] = -(inverse[..., lower, lower] @ strict[..., lower, upper] @ inverse[..., upper, upper])
            block *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -torch.tril(inverse.mT @ grad @ inverse.mT, -1)
