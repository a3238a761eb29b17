"""The tokens before each chunk, over real ranks, against slices of the whole sample; their gradients; and how many tokens travel."""

import pytest
import torch
from torch import Tensor

from hybrid_megatron.parallel import SequenceLayout
from hybrid_megatron.parallel.halo import halo_tokens, preceding_tokens
from tests.cpu import attention_cells
from tests.definitions import relative_error

LENGTH = 48  # chunks of 12 over two ranks, of 6 over four
WIDTHS = [0, 1, 5, 6, 7, 12, 13, 31, 47, 100]  # none, within a chunk, a chunk, several, all but one, more than the sample


@pytest.fixture(scope="module")
def sample() -> Tensor:
    return torch.randn(2, LENGTH, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def halos_of(x: Tensor, width: int, size: int) -> dict[int, Tensor]:
    """Of every chunk, cut from the whole sample."""
    starts = range(0, LENGTH, LENGTH // (2 * size))
    return {chunk: x[:, max(start - width, 0) : start] for chunk, start in enumerate(starts)}


@pytest.mark.parametrize("size", [2, 4])
def test_halos_gradients_and_traffic(ranks, sample, size):
    answers = ranks.run(size, attention_cells.halos_over_ranks, size, sample, WIDTHS)
    for i, width in enumerate(WIDTHS):
        whole = sample.clone().requires_grad_()
        expected = halos_of(whole, width, size)
        attention_cells.halo_loss(expected, whole).backward()
        for rank, results in enumerate(answers):
            layout = SequenceLayout(LENGTH, size, rank)
            halos, gradient, traffic = results[i]
            for chunk, halo in zip(layout.chunks, halos):
                assert torch.equal(halo, expected[chunk]), f"width {width}, chunk {chunk}"
            assert relative_error(gradient, layout.local(whole.grad)) <= 1e-15, f"width {width}, rank {rank}"
            assert traffic == ([(halo_tokens(width, layout), 0)] if width else []), f"width {width}, rank {rank}: tokens moved"


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("width", WIDTHS)
def test_received_tokens_are_those_seen_and_not_held(size, width):
    length = 96
    for rank in range(size):
        layout = SequenceLayout(length, size, rank)
        starts = [chunk * layout.chunk_length for chunk in layout.chunks]
        seen = {place for start in starts for place in range(max(start - width, 0), start)}
        assert halo_tokens(width, layout) == len(seen - set(layout.positions("cpu").tolist()))


def test_without_context_parallelism_nothing_comes_before(sample):
    (halo,) = preceding_tokens(sample, 5, SequenceLayout(LENGTH), None)
    assert halo.shape == (2, 0, 3, 2) and halo_tokens(5, SequenceLayout(LENGTH)) == 0


def test_a_wrong_length_is_refused(sample):
    with pytest.raises(AssertionError, match="48 tokens under a layout of 24"):
        preceding_tokens(sample, 1, SequenceLayout(LENGTH, 2, 0), None)
