"""From chunks of the sequence to blocks of heads and back."""

import pytest
import torch

from tests.cpu import op_cells


@pytest.mark.parametrize("tail", [(), (5,), (2, 3)])
@pytest.mark.parametrize("size", [2, 4])
def test_exchange_and_its_inverse(ranks, size, tail):
    """Moved, not computed: equal to the last bit, in sequence order. Gradients go back to where the numbers came from."""
    x = torch.randn(2, 24, 8, *tail, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    share = 8 // size
    for rank, (heads, back, gradient, local) in enumerate(ranks.run(size, op_cells.exchange_of_heads, size, x)):
        assert torch.equal(heads, x[:, :, rank * share : (rank + 1) * share])
        assert torch.equal(back, local)
        assert torch.equal(gradient, 3 * local), "of the sum of 1.5 x^2, by way of the other ranks"
