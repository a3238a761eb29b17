"""Sliding windows by strides against the published overlapping windows, and both against the recurrences' definitions, in float64."""

import pytest
import torch
from torch import Tensor

from hybrid_megatron.ops.recurrence import Recurrence
from hybrid_megatron.ops.swla import SlidingWindow, overlapped_windows, sliding_window
from tests.cpu.recurrence_cases import EXACT, KINDS, SCALE, definition_of, draw, rule_of, starts_at
from tests.definitions import relative_error

WINDOWS = ((32, 8), (32, 16), (16, 16), (24, 8))
STARTS = {"none": None, "documents": ((0, 7, 8, 60, 100), (33, 34)), "one": ((0,), (1,))}


def starts_of(name: str, length: int) -> Tensor | None:
    if STARTS[name] is None:
        return None
    return starts_at(length, *([place for place in row if place < length] for row in STARTS[name]))


def by_definition(rule: Recurrence, inputs: tuple[Tensor, ...], window: int, stride: int, starts: Tensor | None) -> Tensor:
    """Each stride from the first token that it sees."""
    outputs = []
    for begin in range(0, inputs[0].shape[1], stride):
        first = max(0, begin - window + stride)
        seen = slice(first, begin + stride)
        o, _ = definition_of(rule)(tuple(x[:, seen] for x in inputs), None, None if starts is None else starts[:, seen])
        outputs.append(o[:, begin - first :])
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize(("window", "stride"), WINDOWS)
@pytest.mark.parametrize("kind", KINDS)
def test_strides_are_windows_are_the_definition(kind, window, stride, starts):
    """A length that ends within a stride; beta of the delta rule up to 2."""
    rule, inputs, starts = rule_of(kind), draw(kind, 123), starts_of(starts, 123)
    expected = by_definition(rule, inputs, window, stride, starts)
    for form in (overlapped_windows, sliding_window):
        o = form(rule, inputs, scale=SCALE, window=window, stride=stride, document_starts=starts)
        assert relative_error(o, expected) <= EXACT, form.__name__


@pytest.mark.parametrize("length", [1, 8, 31, 32, 33, 40, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_lengths_about_a_window(kind, length):
    rule, inputs = rule_of(kind), draw(kind, length)
    expected = by_definition(rule, inputs, 32, 8, None)
    for form in (overlapped_windows, sliding_window):
        assert relative_error(form(rule, inputs, scale=SCALE, window=32, stride=8), expected) <= EXACT, form.__name__


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_forgets(kind):
    """What came before a token's window changes nothing, although the whole recurrence would still know it."""
    rule, inputs = rule_of(kind), draw(kind, 80)
    changed = tuple(torch.cat((torch.rand_like(x[:, :16]) * x[:, :16], x[:, 16:]), 1) for x in inputs)
    before, after = (sliding_window(rule, x, scale=SCALE, window=32, stride=8) for x in (inputs, changed))
    assert torch.equal(before[:, 40:], after[:, 40:]) and not torch.equal(before[:, 39], after[:, 39])
    whole, other = (rule.run(x, scale=SCALE)[0] for x in (inputs, changed))
    assert relative_error(whole[:, 40:], other[:, 40:]) > 1e-6


def test_gradients_are_refused():
    """Summaries have none, so those of a window would be wrong."""
    inputs = tuple(x.requires_grad_() for x in draw("gdn", 80))
    with pytest.raises(AssertionError, match="windows are for inference"):
        SlidingWindow(rule_of("gdn"), 32, 8).run(inputs, scale=SCALE)
    with torch.no_grad():
        SlidingWindow(rule_of("gdn"), 32, 8).run(inputs, scale=SCALE)


@pytest.mark.parametrize(("window", "stride"), [(32, 12), (8, 16)])
@pytest.mark.parametrize("form", [overlapped_windows, sliding_window])
def test_windows_of_no_whole_number_of_strides_are_refused(form, window, stride):
    with pytest.raises(AssertionError, match=f"a window of {window} tokens in strides of {stride}"):
        form(rule_of("lightning"), draw("lightning", 20), scale=SCALE, window=window, stride=stride)
