"""The linear layers between mixers and around SwiGLU, split over tensor ranks, by what computes them (`model.kernels.linear`).

Their parameters are the same by name, shape and cut, so a checkpoint moves from one to another.
"""

from typing import NamedTuple

from torch import Tensor

from hybrid_megatron import platform
from hybrid_megatron.model.unit_order import UnitOrder
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

LINEAR = ("torch", "te")


class Linears(NamedTuple):
    column: type
    """Its rows are split."""
    row: type
    """Its columns are split."""
    input_projection: type


def linears(backend: str) -> Linears:
    """A CPU has torch's alone."""
    if backend == "te" and platform.is_cuda():
        from hybrid_megatron.model import transformer_engine as te  # only where it is installed

        return Linears(te.Column, te.Row, te.InputProjection)
    return Linears(ColumnParallelLinear, RowParallelLinear, InputProjection)


class InputProjection(ColumnParallelLinear):
    """Its weight is stored in unit order, so that tensor ranks hold contiguous parts of it, and multiplies in block order."""

    rearranges_weight = True
    """What multiplies is another tensor, through which the weight's gradient comes back."""

    def __init__(self, order: UnitOrder, hidden_size: int, **shared):
        super().__init__(hidden_size, order.rows, gather_output=False, skip_bias_add=False, **shared)
        self.order = order

    def _forward_impl(self, input: Tensor, weight: Tensor, *args, **more) -> Tensor:
        """hidden [s, b, h] -> [s, b, rows of this tensor rank's units in block order, filled up]."""
        return super()._forward_impl(input, self.order.in_block_order(weight), *args, **more)
