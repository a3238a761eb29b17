"""Sliding-window linear attention: a linear recurrence that forgets all but the last `window` tokens, by strides.

A token in stride c = t // stride sees the strides max(0, c - window / stride + 1) .. c from a zero state: between window - stride and
window tokens. The published form runs overlapping windows and keeps the last stride of each, so every token is computed window / stride
times. The states at the strides' borders give the same, exactly: each stride's effect on the state is affine, and a stride starts from
the effects of the window / stride - 1 strides before it, one after the other. Nothing is subtracted or divided.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.ops.recurrence import Recurrence


class SlidingWindow(Recurrence):
    """A recurrence that sees only its last `window` tokens. It has no state that passes on: it runs over whole samples only."""

    def __init__(self, recurrence: Recurrence, window: int, stride: int):
        self.recurrence, self.window, self.stride = recurrence, window, stride
        self.input_names = recurrence.input_names

    def run(self, inputs, *, scale, initial_state=None, document_starts=None):
        assert initial_state is None, "a window begins from nothing"
        assert not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)), (
            "windows are for inference: summaries have no gradients"
        )
        window, stride = self.window, self.stride
        return sliding_window(self.recurrence, inputs, scale=scale, window=window, stride=stride, document_starts=document_starts), None

    def recurrent(self, inputs, *, scale, initial_state=None, document_starts=None):
        raise NotImplementedError("its definition is overlapped_windows")

    def summary(self, inputs, document_starts=None):
        raise NotImplementedError("what a window saw is no function of the state before it alone")

    def for_heads(self, heads: slice) -> "SlidingWindow":
        return SlidingWindow(self.recurrence.for_heads(heads), self.window, self.stride)


def sliding_window(
    recurrence: Recurrence, inputs: tuple[Tensor, ...], *, scale: float, window: int, stride: int, document_starts: Tensor | None = None
) -> Tensor:
    """o [b, s, n, V] of the recurrence within windows; inputs [b, s, n, ...], window a multiple of stride, any s."""
    earlier = _strides_of(window, stride) - 1
    batch, length = inputs[0].shape[:2]
    if length <= window:
        return recurrence.run(inputs, scale=scale, document_starts=document_starts)[0]
    inputs, starts = [_by_stride(x, stride) for x in inputs], None
    if document_starts is not None:
        starts = _by_stride(document_starts, stride)
    initial = None
    if earlier:
        initial = _folded(recurrence, inputs, starts, earlier).flatten(0, 1)
    inputs = tuple(x.flatten(0, 1) for x in inputs)  # strides become batch entries
    starts = None if starts is None else starts.flatten(0, 1)
    o, _ = recurrence.run(inputs, scale=scale, initial_state=initial, document_starts=starts)
    return o.unflatten(0, (batch, -1)).flatten(1, 2)[:, :length]


def overlapped_windows(
    recurrence: Recurrence, inputs: tuple[Tensor, ...], *, scale: float, window: int, stride: int, document_starts: Tensor | None = None
) -> Tensor:
    """The published form of `sliding_window`: windows [j stride, j stride + window), each from a zero state, the last one cut at the end
    of the sequence. All outputs of the first are kept, and of each later one those that no window before it has."""
    strides, length = _strides_of(window, stride), inputs[0].shape[1]
    outputs = []
    for begin in range(0, max(length - window + stride, 1), stride):
        here = slice(begin, begin + window)
        starts = None if document_starts is None else document_starts[:, here]
        o, _ = recurrence.run(tuple(x[:, here] for x in inputs), scale=scale, document_starts=starts)
        outputs.append(o if begin == 0 else o[:, (strides - 1) * stride :])
    return torch.cat(outputs, dim=1)


def _strides_of(window: int, stride: int) -> int:
    assert 0 < stride <= window and window % stride == 0, f"a window of {window} tokens in strides of {stride}"
    return window // stride


def _by_stride(x: Tensor, stride: int) -> Tensor:
    """[b, s, ...] -> [b, count, stride, ...], with zeros after the last token."""
    if short := -x.shape[1] % stride:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, short))
    return x.unflatten(1, (-1, stride))


def _folded(recurrence: Recurrence, inputs: list[Tensor], starts: Tensor | None, earlier: int) -> Tensor:
    """[b, count, n, K, V] the state that each stride starts from: from zero through up to `earlier` strides before it."""
    batch, count = inputs[0].shape[:2]
    before = [x[:, :-1].flatten(0, 1) for x in inputs]  # the last stride is before no other
    summary = recurrence.summary(tuple(before), None if starts is None else starts[:, :-1].flatten(0, 1))
    # Zeros stand for the strides before the first.
    transition, added = (F.pad(x.unflatten(0, (batch, count - 1)), (0, 0) * 3 + (earlier, 0)) for x in summary)
    state = added[:, :count]
    for first in range(1, earlier):
        state = recurrence.apply(transition[:, first : first + count], state, added[:, first : first + count])
    return state
