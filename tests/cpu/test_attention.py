"""Causal softmax attention and rotary positions against their definitions, on one process and with the sequence cut over ranks."""

import math

import pytest
import torch
from torch import Tensor

from hybrid_megatron.model.attention import causal, two_parts
from hybrid_megatron.model.attention.alignment import aligned
from hybrid_megatron.model.attention.causal import causal_attention
from hybrid_megatron.model.attention.rope import rotate
from hybrid_megatron.parallel import SequenceLayout
from tests import definitions
from tests.cpu import attention_cells, op_cells
from tests.definitions import relative_error

SCALE = 0.25
STARTS = {"none": None, "documents": ((0, 10, 11, 40, 63), (0,), (5, 24, 32), ())}


def draw(length: int, heads: int = 4, kv_heads: int = 2, width: int = 8) -> list[Tensor]:
    random = torch.Generator().manual_seed(length)
    return [torch.randn(4, length, n, width, generator=random, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]


def starts_of(name: str, length: int) -> Tensor | None:
    if STARTS[name] is None:
        return None
    starts = torch.zeros(4, length, dtype=torch.bool)
    for row, places in zip(starts, STARTS[name]):
        row[[place for place in places if place < length]] = True
    return starts


def with_gradients(function, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    o = function(*leaves)
    (o.double() * weights_of(inputs)).sum().backward()
    return [o.detach(), *(x.grad for x in leaves)]


def weights_of(inputs: list[Tensor]) -> Tensor:
    return torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def exact(inputs: list[Tensor], starts: Tensor | None) -> list[Tensor]:
    return with_gradients(lambda q, k, v: definitions.causal_attention(q, k, v, SCALE, starts), [x.double() for x in inputs])


def check(found: list[Tensor], expected: list[Tensor], bound: float) -> None:
    """Relative to each tensor's own norm; to the largest where that is zero, as the gradients of q and k are in a sample of one token."""
    largest = max(float(x.norm()) for x in expected)
    for name, mine, theirs in zip(("output", "gradient of q", "gradient of k", "gradient of v"), found, expected):
        norm = float(theirs.norm())
        error = float((mine.double() - theirs).norm()) / (norm if norm > 1e-10 * largest else largest)
        assert error <= bound, f"{name}: {error:.2e}"


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("length", [1, 37, 64])
def test_float64_is_exact(length, heads, kv_heads, starts):
    inputs, masked = draw(length, heads, kv_heads), starts_of(starts, length)
    found = with_gradients(lambda q, k, v: causal_attention(q, k, v, SequenceLayout(length, document_starts=masked), SCALE, None), inputs)
    check(found, exact(inputs, masked), 1e-12)


@pytest.mark.parametrize("starts", STARTS)
def test_float32(starts):
    """Logits of size 1 carry 2^-24 a product, sums of 64 of them a few: 2e-6."""
    inputs, masked = [x.float() for x in draw(64)], starts_of(starts, 64)
    found = with_gradients(lambda q, k, v: causal_attention(q, k, v, SequenceLayout(64, document_starts=masked), SCALE, None), inputs)
    assert found[0].dtype == torch.float32
    check(found, exact(inputs, masked), 2e-6)


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("size", [2, 4])
def test_chunks_of_queries_are_the_whole(monkeypatch, size, starts):
    """The form used under context parallelism, all ranks' chunks one after the other in this process."""
    inputs, masked = draw(64), starts_of(starts, 64)
    monkeypatch.setattr(causal, "_gather_keys_and_values", lambda k, v, layout, group: (k, v))  # they are whole already

    def by_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = torch.zeros_like(q)
        for rank in range(size):
            layout = SequenceLayout(64, size, rank, masked)
            o = o.index_copy(1, layout.positions("cpu"), causal_attention(layout.local(q), k, v, layout, SCALE, None))
        return o

    plain = with_gradients(lambda q, k, v: causal_attention(q, k, v, SequenceLayout(64, document_starts=masked), SCALE, None), inputs)
    check(with_gradients(by_chunks, inputs), plain, 1e-12)


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_the_whole(ranks, size, starts):
    """Keys and values gathered over real ranks; their gradients are summed on the way back."""
    inputs, masked = draw(64), starts_of(starts, 64)
    expected = exact(inputs, masked)
    answers = ranks.run(size, op_cells.mixing_over_ranks, size, "attention", inputs, weights_of(inputs), masked, SCALE)
    for positions, o, gradients in answers:
        check([o, *gradients], [x[:, positions] for x in expected], 1e-12)


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize(("size", "kv_heads"), [(2, 2), (4, 4)])
def test_shares_of_heads_are_the_whole(ranks, size, kv_heads, starts):
    """Whole samples for a share of the heads on each rank, and keys and values gathered, against the definition."""
    inputs, masked = draw(64, 4, kv_heads), starts_of(starts, 64)
    expected = exact(inputs, masked)
    cases = [{"exchange": "all_to_all"}, {"exchange": "gather"}]
    for positions, results in ranks.run(size, attention_cells.attention_over_ranks, size, inputs, weights_of(inputs), masked, SCALE, cases):
        for result in results:
            check(result, [x[:, positions] for x in expected], 1e-12)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(AssertionError, match="3 heads over 2 context ranks"):
        causal_attention(*draw(32, 3, 3), SequenceLayout(64, 2, 0), SCALE, None, exchange="all_to_all")


def test_an_unknown_exchange_is_refused():
    with pytest.raises(AssertionError, match="ring"):
        causal_attention(*draw(64), SequenceLayout(64), SCALE, None, exchange="ring")


@pytest.mark.parametrize("starts", ["none", "documents"])
def test_later_tokens_do_not_reach_earlier_ones(starts):
    inputs, masked = draw(64), starts_of(starts, 64)
    layout = SequenceLayout(64, document_starts=masked)
    before = causal_attention(*inputs, layout, SCALE, None)
    changed = [torch.cat((x[:, :41], torch.randn_like(x[:, 41:])), 1) for x in inputs]
    assert torch.equal(before[:, :41], causal_attention(*changed, layout, SCALE, None)[:, :41])


def test_a_wrong_length_is_refused():
    with pytest.raises(AssertionError, match="32 tokens under a layout of 64"):
        causal_attention(*draw(32), SequenceLayout(64), SCALE, None)


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_rope_turns_pairs_by_their_positions(base):
    x = draw(64)[0]
    assert relative_error(rotate(x, SequenceLayout(64), base), definitions.rope(x, base)) <= 1e-12
    same = x[:, [9]].expand_as(x)
    turned = rotate(same, SequenceLayout(64), base)
    logits = [torch.einsum("bnd,bnd->bn", turned[:, later], turned[:, earlier]) for later, earlier in ((9, 4), (39, 34))]
    assert relative_error(logits[0], logits[1]) <= 1e-12, "only the distance counts"


@pytest.mark.parametrize("rank", [0, 1])
def test_rope_under_context_parallelism_turns_by_global_positions(rank):
    x = draw(64)[0]
    layout = SequenceLayout(64, 2, rank)
    assert torch.equal(rotate(layout.local(x), layout, 1e4), layout.local(rotate(x, SequenceLayout(64), 1e4)))


def test_rope_in_float32_keeps_its_digits_far_from_the_start():
    """A position of 32,767 times a frequency would lose five digits if multiplied in float32."""
    x = torch.randn(1, 32_768, 1, 8, generator=torch.Generator().manual_seed(0))
    exact_tail = definitions.rope(x.double(), 1e4)[:, -100:]
    assert relative_error(rotate(x, SequenceLayout(32_768), 1e4)[:, -100:], exact_tail) <= 1e-7
    narrow = rotate(x.bfloat16(), SequenceLayout(32_768), 1e4)
    assert narrow.dtype == torch.bfloat16
    assert relative_error(narrow[:, -100:], definitions.rope(x.bfloat16().double(), 1e4)[:, -100:]) <= 2**-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_off_a_border_of_16_bytes_are_copied(dtype):
    """What kernels on CUDA read wrongly; a head-wise layer's slices are such ones."""
    rows = torch.randn(2, 64, 3, 8 * 3 + 2).to(dtype)  # three heads with q, k, v and two rows of gates
    q, k, v = rows[..., :24].split(8, dim=-1)
    for x in (q, k, v):
        assert aligned(x).is_contiguous() and torch.equal(aligned(x), x)
    even = torch.randn(2, 64, 3, 8 * 4).to(dtype)
    for x in even.split(8, dim=-1):
        assert aligned(x) is x
    assert aligned(even[..., 1:9]) is not even and aligned(even[..., 1:9]).is_contiguous(), "the first row is off"
    assert aligned(even.transpose(-1, -2)).is_contiguous(), "the last dimension is not dense"


def test_two_parts_lie_in_memory_as_their_kernel_writes_one():
    """torch keeps cuDNN's backward graphs by the strides of q, k, v and the gradient, and takes the output's for known: laid otherwise,
    gradients of q and k were wrong."""
    o, other = (torch.randn(16, 2, 4, 8).permute(1, 2, 0, 3) for _ in range(2))  # sequence first, as the kernel's output where q is
    sums = torch.randn(2, 4, 16)
    joined, joined_sums = two_parts._joined(o, sums, other, sums)
    assert joined.stride() == o.stride()
    assert relative_error(joined, (o + other) / 2) <= 1e-6 and relative_error(joined_sums, sums + math.log(2)) <= 1e-6
