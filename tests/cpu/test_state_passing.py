"""The recurrences with the sequence cut over ranks, by passing states and by exchanging heads, against their definitions over the whole
sequence, in float64."""

from functools import lru_cache

import pytest
import torch
from torch import Tensor

from hybrid_megatron.ops.fixed_decay import FixedDecay
from hybrid_megatron.ops.recurrence import Recurrence
from hybrid_megatron.ops.state_passing import pieces_of_a_chunk
from hybrid_megatron.parallel import SequenceLayout
from tests.cpu import op_cells
from tests.cpu.quick import half_quick
from tests.cpu.recurrence_cases import KINDS, SCALE, definition_of, draw, rule_of, starts_at
from tests.definitions import relative_error

LENGTH = 144
STARTS = {
    "none": None,
    "documents": starts_at(LENGTH, (0, 5, 35, 36, 100), (72, 143)),  # at, before and after the borders of chunks of 36 and 18
    "one document over all chunks": starts_at(LENGTH, (0,), (1,)),
}


@lru_cache(maxsize=4)
def whole(kind: str, heads: int, starts: str, keeps_all: bool) -> tuple[Recurrence, list[Tensor], Tensor, Tensor, list[Tensor]]:
    """The rule, its inputs, weights of the outputs, and by definition the outputs and the gradients of their weighted sum."""
    rule, inputs = rule_of(kind, heads), list(draw(kind, LENGTH, heads))
    if keeps_all:  # nothing decays: every state matters to the end
        rule = FixedDecay(torch.zeros(heads, dtype=torch.float64)) if kind == "lightning" else rule
        inputs[3:4] = [torch.zeros_like(x) for x in inputs[3:4]]
    weights = torch.randn(2, LENGTH, heads, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in inputs]
    o, _ = definition_of(rule)(tuple(leaves), None, STARTS[starts])
    (o * weights).sum().backward()
    return rule, inputs, weights, o.detach(), [x.grad for x in leaves]


def check(ranks, size: int, way: str, case: tuple, starts: str, pieces: int = 1) -> None:
    rule, inputs, weights, expected, gradients = case
    given = (size, way, inputs, weights, STARTS[starts], SCALE, rule, pieces)
    for positions, o, mine in ranks.run(size, op_cells.mixing_over_ranks, *given):
        assert relative_error(o, expected[:, positions]) <= 1e-12
        for name, local, exact in zip(rule.input_names, mine, gradients):
            assert relative_error(local, exact[:, positions]) <= 1e-12, name


@pytest.mark.parametrize("size, kind, case", half_quick([2, 4], KINDS, [*((name, False) for name in STARTS), ("none", True)]))
def test_passing_states_computes_the_whole(ranks, size, kind, case):
    """Three heads, which divide by neither number of ranks."""
    starts, keeps_all = case
    check(ranks, size, "states", whole(kind, 3, starts, keeps_all), starts)


@pytest.mark.parametrize("starts", ["none", "documents"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2])
def test_pieces_of_chunks_compute_the_whole(ranks, size, kind, starts):
    """As on a GPU that samples and heads do not fill: three pieces of each chunk, on one rank and on two."""
    check(ranks, size, "states", whole(kind, 3, starts, False), starts, pieces=3)


class OnAGpu:
    is_cuda = True

    def __init__(self, *shape: int):
        self.shape = shape


@pytest.mark.parametrize(
    "batch, context, ranks, heads, expected",
    [
        (8, 4096, 1, 12, 1),  # full as it is
        (1, 32_768, 1, 12, 8),  # 96 heads of pieces of 4,096 tokens
        (1, 131_072, 2, 12, 4),  # two chunks of 32,768: 96 again
        (1, 8192, 1, 4, 4),  # no shorter than 2,048
        (1, 32_768 + 128, 1, 12, 2),  # whole chunks of the kernels
        (1, 32_768, 8, 12, 1),
    ],
)
def test_how_many_pieces(batch, context, ranks, heads, expected):
    layout = SequenceLayout(context, ranks, 0)
    q = OnAGpu(batch, layout.local_length, heads, 128)
    assert pieces_of_a_chunk(rule_of("gdn"), q, layout) == expected
    assert pieces_of_a_chunk(rule_of("rwkv7"), q, layout) == 1, "its passes over states take longer than it does"
    with torch.no_grad():
        assert pieces_of_a_chunk(rule_of("gdn"), q, layout) == expected, "else what is computed again differs"


@pytest.mark.parametrize("size, kind, starts", half_quick([2, 4], KINDS, ["none", "documents"]))
def test_exchanging_heads_computes_the_whole(ranks, size, kind, starts):
    check(ranks, size, "heads", whole(kind, 4, starts, False), starts)


@pytest.mark.parametrize("way", ["states", "heads"])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_with_gates_in_float32(ranks, kind, way):
    """The dtypes of a training: the output is rounded once, at the end."""
    rule, inputs, weights, *_ = whole(kind, 4, "none", False)
    inputs = [x.bfloat16() if i < 3 else x.float() for i, x in enumerate(inputs)]
    expected, _ = definition_of(rule)(tuple(x.double() for x in inputs), None, None)
    for positions, o, gradients in ranks.run(2, op_cells.mixing_over_ranks, 2, way, inputs, weights, None, SCALE, rule):
        assert o.dtype == torch.bfloat16 and [x.dtype for x in gradients] == [x.dtype for x in inputs]
        assert relative_error(o, expected[:, positions]) <= 2**-9


def test_heads_that_do_not_divide_are_refused(ranks):
    rule, inputs, weights, *_ = whole("lightning", 3, "none", False)
    with pytest.raises(AssertionError, match="3 heads over 2 context ranks"):
        ranks.run(2, op_cells.mixing_over_ranks, 2, "heads", inputs, weights, None, SCALE, rule)
