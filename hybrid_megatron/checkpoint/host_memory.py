"""Host memory of saves: one copy of what a rank writes, so that training may go on meanwhile; and whether there is room for it."""

import contextlib
import itertools
import socket
from collections.abc import Sequence

import numpy as np
import torch

from hybrid_megatron import platform
from hybrid_megatron.checkpoint.sizes import size
from hybrid_megatron.parallel import ParallelState

_ALIGNED = 64  # bytes
_USABLE = 0.9
"""Of the memory that is free when it is looked at: others on the host take some as well."""


def short_of_memory(state: ParallelState, needed: int) -> str | None:
    """Which host has too little memory for what all its ranks need now, `needed` bytes on this one; None if every host has enough.
    Collective, and the same on all ranks."""
    hosts: dict[str, list[tuple[int, int | None]]] = {}
    for host, *told in state.of_all_ranks((socket.gethostname(), needed, platform.available_host_memory())):
        hosts.setdefault(host, []).append(tuple(told))
    for host, told in hosts.items():
        need, free = sum(each for each, _ in told), min((free for _, free in told if free is not None), default=None)
        if need and free is not None and need > _USABLE * free:
            return f"{host} has {size(free)} of memory free, and its ranks need {size(need)}"
    return None


class HostMemory:
    """A block that takes copies of tensors and is used again by the next save; page-locked where there is CUDA, for the speed of copies.

    It is as large as the largest file that this rank has copied: with P parameters, of b bytes each (2 in bf16, 4 in fp32), in all about
    P * (b + 12) / GPUs bytes, 1.4 GB a GPU for 776m on 8 and 3.4 GB for 3b on 16.
    """

    def __init__(self):
        self._block = np.empty(0, np.uint8)
        self._locked = False

    def lacking(self, tensors: Sequence[torch.Tensor]) -> int:
        """Bytes that copies of these would take beyond the block as it is."""
        return max(sum(map(_length, tensors)) - self._block.size, 0)

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies that stand when this returns and until the next call; each has a storage of its own length."""
        lengths = list(map(_length, tensors))
        self._reserve(sum(lengths))
        copies = [self._at(start, tensor) for start, tensor in zip(itertools.accumulate(lengths, initial=0), tensors)]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        platform.synchronize()
        return copies

    def release(self) -> None:
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._block.ctypes.data)
        self._block, self._locked = np.empty(0, np.uint8), False

    def _at(self, start: int, like: torch.Tensor) -> torch.Tensor:
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype)
        return torch.frombuffer(self._block, dtype=like.dtype, count=like.numel(), offset=start).view(like.shape)

    def _reserve(self, length: int) -> None:
        if length <= self._block.size:
            return
        self.release()
        self._block = np.empty(length, np.uint8)
        self._locked = platform.is_cuda() and _lock(self._block)


def _length(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED


def _lock(block: np.ndarray) -> bool:
    """Page-lock it as it is (torch's own pinned memory is rounded up to powers of two). False if the system refuses: copies are slower."""
    locked = int(torch.cuda.cudart().cudaHostRegister(block.ctypes.data, block.nbytes, 0)) == 0
    if not locked:  # the refusal is now CUDA's last error, which the next kernel would report as its own: let it be this one
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=platform.device()).add_(1)
    return locked
