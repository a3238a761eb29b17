"""The short convolution against torch's Conv1d and, within documents, its definition; on one process and over ranks."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.ops.short_convolution import short_convolution
from hybrid_megatron.parallel import SequenceLayout
from tests import definitions
from tests.cpu import attention_cells
from tests.cpu.test_attention import STARTS, starts_of
from tests.definitions import relative_error

LENGTH = 64


def draw(width: int, length: int = LENGTH, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x [4, length, 6], taps [6, width] and the weights of the output in the sum whose gradients are compared."""
    random = torch.Generator().manual_seed(width)
    return tuple(torch.randn(shape, generator=random, dtype=dtype) for shape in ((4, length, 6), (6, width), (4, length, 6)))


def with_gradients(function, x: Tensor, taps: Tensor, weights: Tensor) -> list[Tensor]:
    x, taps = x.clone().requires_grad_(), taps.clone().requires_grad_()
    y = function(x, taps)
    (y * weights).sum().backward()
    return [y.detach(), x.grad, taps.grad]


def check(found: list[Tensor], expected: list[Tensor], bound: float = 1e-12) -> None:
    for name, mine, theirs in zip(("output", "gradient of x", "gradient of the taps"), found, expected):
        assert mine.dtype == theirs.dtype and relative_error(mine, theirs) <= bound, f"{name}: {relative_error(mine, theirs):.2e}"


@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("length", [1, 3, 64])
def test_convolution_of_torch(width, length):
    def conv1d(x: Tensor, taps: Tensor) -> Tensor:
        return F.conv1d(F.pad(x.transpose(1, 2), (width - 1, 0)), taps[:, None], groups=taps.shape[0]).transpose(1, 2)

    found = with_gradients(lambda x, taps: short_convolution(x, taps, SequenceLayout(length), None), *draw(width, length))
    check(found, with_gradients(conv1d, *draw(width, length)))


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("width", [1, 4, 7])
def test_documents(width, starts):
    """Documents of one token among them; a document that began before the sample."""
    masked = starts_of(starts, LENGTH)
    layout = SequenceLayout(LENGTH, document_starts=masked)
    found = with_gradients(lambda x, taps: short_convolution(x, taps, layout, None), *draw(width))
    check(found, with_gradients(lambda x, taps: definitions.short_convolution(x, taps, masked), *draw(width)))


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_the_whole(ranks, size, starts):
    """Chunks of 16 and 8 tokens: taps over one token, a few, a chunk and more than two."""
    widths, masked = (1, 4, 9, 20), starts_of(starts, LENGTH)
    x, _, weights = draw(4)
    all_taps = [draw(width)[1] for width in widths]
    answers = ranks.run(size, attention_cells.convolution_over_ranks, size, x, all_taps, weights, masked)
    for i, taps in enumerate(all_taps):
        y, dx, dtaps = with_gradients(lambda x, taps: definitions.short_convolution(x, taps, masked), x, taps, weights)
        for positions, results in answers:
            check(results[i][:2], [y[:, positions], dx[:, positions]])
        assert relative_error(sum(results[i][2] for _, results in answers), dtaps) <= 1e-12


def test_bfloat16_sums_in_float32():
    """Rounded once, on the way out: half a place of eight bits, 2^-8 of each value at most. Sums in bfloat16 are several roundings off."""
    x, taps, _ = (tensor.bfloat16() for tensor in draw(7))
    y = short_convolution(x, taps, SequenceLayout(LENGTH), None)
    exact = definitions.short_convolution(x.double(), taps.double())
    assert y.dtype == torch.bfloat16
    assert ((y.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()
