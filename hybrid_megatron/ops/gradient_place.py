"""Gradients of slices that are written where they belong in the gradient of the whole, so that nothing copies them there.

The rows of an input projection are cut into slices, most of which one kernel reads. Who cuts leaves word with the whole
(`GradientOfSlices.of`); a kernel's autograd function asks for its input's place in the forward pass (`place_of_gradient`), and writes the
gradient there in the backward pass. Who cut takes the whole gradient last, and copies to it what came from elsewhere.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

_WORD = "_gradient_of_slices"


class GradientOfSlices:
    """The gradient of one tensor, made when the first slice's is."""

    def __init__(self, whole: Tensor):
        self._shape, self._dtype, self._device, self._begins = whole.shape, whole.dtype, whole.device, whole.storage_offset()
        self._gradient: Tensor | None = None
        self._given: list[range] = []  # of a row, to those who write there

    @staticmethod
    def of(whole: Tensor) -> "GradientOfSlices":
        """whole must be contiguous; of one that is itself a slice the slices are not known."""
        assert whole.is_contiguous()
        gradient = GradientOfSlices(whole)
        if not whole._is_view():
            setattr(whole, _WORD, gradient)
        return gradient

    def of_slice(self, shape: torch.Size, stride: tuple[int, ...], begins: int) -> Tensor:
        """Its place, or another tensor for all but the first of those who read the same: autograd adds their gradients up."""
        row, begins = self._shape[-1], begins - self._begins
        first = begins % row
        mine = range(first, first + sum((length - 1) * step for length, step in zip(shape, stride) if step < row) + 1)
        if any(mine.start < other.stop and other.start < mine.stop for other in self._given):
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        self._given.append(mine)
        return self._made().as_strided(shape, stride, begins)

    def take(self) -> Tensor:
        """What has been written to so far, and the rest uninitialised; the next one is another."""
        gradient, self._gradient, self._given = self._made(), None, []
        return gradient

    def _made(self) -> Tensor:
        if self._gradient is None:
            self._gradient = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return self._gradient


def place_of_gradient(x: Tensor) -> Callable[[], Tensor] | None:
    """Gives, in the backward pass, where the gradient of x is to be written; None where x is no slice of such a tensor."""
    whole = getattr(x._base, _WORD, None) if x._is_view() else None
    return None if whole is None else partial(whole.of_slice, x.shape, x.stride(), x.storage_offset())
