"""Tensors as the attention kernels of CUDA need them: every head's row on a border of 16 bytes.

The input projection has q, k and v on such borders (unit_order.py) unless a head's width is no multiple of eight. With a slice off them in
bf16, cuDNN's attention returned wrong values without a word (torch 2.11, H200), and the memory-efficient one finds no kernel in float32.
"""

from torch import Tensor

_BORDER = 16  # bytes


def aligned(x: Tensor) -> Tensor:
    """x [..., d] itself, or a contiguous copy if any of its rows begins off the border or its last dimension is not dense."""
    size = x.element_size()
    starts = [x.storage_offset() * size, *(stride * size for stride, length in zip(x.stride()[:-1], x.shape[:-1]) if length > 1)]
    if x.stride(-1) == 1 and not any(start % _BORDER for start in starts) and x.untyped_storage().data_ptr() % _BORDER == 0:
        return x
    return x.contiguous()
