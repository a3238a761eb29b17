"""Sliding-window attention against its definition, on one process and with the sequence cut over ranks; the blocks of its masks."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from hybrid_megatron.model.attention.block_masks import document_blocks, window_blocks
from hybrid_megatron.model.attention.causal import causal_attention
from hybrid_megatron.model.attention.windowed import windowed_attention
from hybrid_megatron.parallel import SequenceLayout
from hybrid_megatron.parallel.halo import halo_tokens
from tests import definitions
from tests.cpu import attention_cells
from tests.cpu.test_attention import SCALE, STARTS, draw, starts_of, weights_of, with_gradients

LENGTH = 64


def exact(inputs: list[Tensor], window: int, starts: Tensor | None) -> list[Tensor]:
    doubles = [x.double() for x in inputs]
    return with_gradients(lambda q, k, v: definitions.windowed_attention(q, k, v, window, SCALE, starts), doubles)


def local(inputs: list[Tensor], window: int, starts: Tensor | None) -> list[Tensor]:
    layout = SequenceLayout(inputs[0].shape[1], document_starts=starts)
    return with_gradients(lambda q, k, v: windowed_attention(q, k, v, layout, window, SCALE, None), inputs)


def check(found: list[Tensor], expected: list[Tensor], bound: float) -> None:
    """Relative to each tensor's norm, or to the output's where it is zero: the gradients of q and k for a window of one token."""
    for name, mine, theirs in zip(("output", "gradient of q", "gradient of k", "gradient of v"), found, expected):
        error = float((mine.double() - theirs).norm() / (theirs.norm() or expected[0].norm()))
        assert error <= bound, f"{name}: {error:.2e}"


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize(("length", "window"), [(1, 1), (37, 1), (64, 3), (64, 63), (64, 64), (200, 20), (200, 90), (200, 1000)])
def test_float64_is_exact(length, window, heads, kv_heads, starts):
    """One block of queries and several, the last not full."""
    inputs, masked = draw(length, heads, kv_heads), starts_of(starts, length)
    check(local(inputs, window, masked), exact(inputs, window, masked), 1e-12)


def test_float32():
    """As for full attention: 2e-6."""
    inputs = [x.float() for x in draw(LENGTH)]
    found = local(inputs, 20, None)
    assert found[0].dtype == torch.float32
    check(found, exact(inputs, 20, None), 2e-6)


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("window", [LENGTH, 10 * LENGTH])
def test_a_window_of_the_whole_context_is_full_attention(window, starts):
    inputs, layout = draw(LENGTH), SequenceLayout(LENGTH, document_starts=starts_of(starts, LENGTH))
    assert torch.equal(windowed_attention(*inputs, layout, window, SCALE, None), causal_attention(*inputs, layout, SCALE, None))


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_the_whole(ranks, size, starts):
    """Windows of one token, of a few, of a chunk, of more than one, of several, of nearly all and of all tokens."""
    inputs, masked = draw(LENGTH), starts_of(starts, LENGTH)
    chunk = LENGTH // (2 * size)
    windows = [1, 3, chunk, chunk + 2, 2 * chunk + 3, LENGTH - 1, LENGTH]
    cases = [{"window": window} for window in windows]
    answers = ranks.run(size, attention_cells.attention_over_ranks, size, inputs, weights_of(inputs), masked, SCALE, cases)
    for i, window in enumerate(windows):
        expected = exact(inputs, window, masked)
        for positions, results in answers:
            check(results[i], [x[:, positions] for x in expected], 1e-12)


def test_keys_and_values_travel_together_and_no_further_than_the_window(ranks):
    for rank, traffic in enumerate(ranks.run(2, attention_cells.windowed_traffic, 2, draw(LENGTH), 20)):
        assert traffic == [(halo_tokens(19, SequenceLayout(LENGTH, 2, rank)), 0)]


@pytest.mark.parametrize("window", [16, 256])
def test_work_grows_with_the_window(monkeypatch, window):
    """Scores computed for 2,048 tokens: at most a window and a block of queries each, not the whole sequence."""
    scores = []
    attention = F.scaled_dot_product_attention

    def counted(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        scores.append(q.shape[2] * k.shape[2])
        return attention(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    local(draw(2048, 1, 1), window, None)
    assert sum(scores) <= 2048 * (window + max(window, 64))


def test_later_tokens_and_those_out_of_the_window_do_not_count():
    inputs, layout = draw(LENGTH), SequenceLayout(LENGTH)
    before = windowed_attention(*inputs, layout, 8, SCALE, None)
    changed = [torch.cat((torch.randn_like(x[:, :10]), x[:, 10:41], torch.randn_like(x[:, 41:])), 1) for x in inputs]
    after = windowed_attention(*changed, layout, 8, SCALE, None)
    assert torch.equal(before[:, 17:41], after[:, 17:41]) and not torch.equal(before[:, 16], after[:, 16])


def test_a_window_of_no_token_is_refused():
    with pytest.raises(AssertionError, match="a window of 0 tokens"):
        windowed_attention(*draw(LENGTH), SequenceLayout(LENGTH), 0, SCALE, None)


def same_blocks(found: BlockMask, visible: Callable, batch: int, queries: int, keys: int) -> None:
    """Against torch's own mask, which is built whole first."""
    expected = create_block_mask(visible, batch, None, queries, keys, device="cpu")
    for kind in ("kv", "full_kv", "q", "full_q"):
        count, places = (getattr(expected, f"{kind}_{what}") for what in ("num_blocks", "indices"))
        assert torch.equal(getattr(found, f"{kind}_num_blocks"), count), kind
        listed = torch.arange(places.shape[-1]) < count[..., None]
        assert torch.equal(getattr(found, f"{kind}_indices")[listed], places[listed]), kind
    b, query, key = torch.randint(batch, (500,)), torch.randint(queries, (500,)), torch.randint(keys, (500,))
    key = torch.where(torch.arange(500) < 250, key, (query + keys - queries - key % 200).clamp_min(0))  # half of them near
    assert torch.equal(found.mask_mod(b, 0, query, key), visible(b, 0, query, key))


@pytest.mark.parametrize("queries", [1, 100, 192, 333])
@pytest.mark.parametrize("window", [None, 1, 2, 129, 366, 367, 699])  # 367: the first to see all of a block of the 333 queries' keys
@pytest.mark.parametrize("share", [0.0, 0.004, 0.03, 0.5])
def test_blocks_of_document_masks(queries, window, share):
    keys, offset, width = 700, 700 - queries, window or 700
    documents = (torch.rand(3, keys, generator=torch.Generator().manual_seed(queries)) < share).long().cumsum(1)

    def visible(b, h, query, key):
        place = query + offset
        return (place >= key) & (place - key < width) & (documents[b, place] == documents[b, key])

    same_blocks(document_blocks(documents, queries, window), visible, 3, queries, keys)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (65, 65), (333, 700), (700, 700), (384, 768), (640, 767)])
@pytest.mark.parametrize("window", [1, 2, 128, 129, 255, 256, 366, 367, 700])  # 256 and 367: the first with blocks seen whole
def test_blocks_of_window_masks(queries, keys, window):
    def visible(b, h, query, key):
        return (query + keys - queries >= key) & (query + keys - queries - key < window)

    found = window_blocks(queries, keys, window, "cpu")
    assert window_blocks(queries, keys, window, "cpu") is found, "built once"
    same_blocks(found, visible, 1, queries, keys)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_one_window_mask_serves_a_batch():
    """FlexAttention uncompiled, which applies the mask of batch dimension 1 to every row; queries are the last of the keys' span."""
    q, k, v = (x.transpose(1, 2) for x in draw(192))
    o = flex_attention(q[:, :, 60:], k, v, block_mask=window_blocks(132, 192, 50, "cpu"), scale=SCALE, enable_gqa=True)
    expected = definitions.windowed_attention(*draw(192), 50, SCALE)[:, 60:]
    assert definitions.relative_error(o.transpose(1, 2), expected) <= 1e-12
