"""Linear recurrences over context ranks by all-to-all: each rank runs the whole sample for its share of the heads.

The bytes sent grow with the length, and the heads must divide by the number of ranks: `state_passing` has neither limit. This is the
choice for short samples with large states.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_megatron.ops.recurrence import Recurrence
from hybrid_megatron.parallel import SequenceLayout
from hybrid_megatron.parallel.all_to_all import heads_from_sequence, sequence_from_heads


def recurrence_over_heads(
    recurrence: Recurrence, inputs: tuple[Tensor, ...], scale: float, layout: SequenceLayout, group: ProcessGroup
) -> Tensor:
    """o [b, s, n, V] of the recurrence for the local tokens, as `recurrence_over_ranks`; n a multiple of the context ranks."""
    assert inputs[0].shape[1] == layout.local_length, f"{inputs[0].shape[1]} tokens under a layout of {layout.local_length}"
    share = inputs[0].shape[2] // layout.size
    mine = recurrence.for_heads(slice(layout.rank * share, (layout.rank + 1) * share))
    o, _ = mine.run(_exchange(inputs, layout, group), scale=scale, document_starts=layout.document_starts)
    return sequence_from_heads(o, layout, group)


def _exchange(inputs: tuple[Tensor, ...], layout: SequenceLayout, group: ProcessGroup) -> tuple[Tensor, ...]:
    """`heads_from_sequence` of all inputs, those of one dtype in one all-to-all."""
    whole: list[Tensor] = list(inputs)
    for dtype in {x.dtype: None for x in inputs}:
        places = [i for i, x in enumerate(inputs) if x.dtype == dtype]
        flat = [inputs[i].flatten(3) if inputs[i].dim() > 3 else inputs[i][..., None] for i in places]
        joined = heads_from_sequence(torch.cat(flat, dim=-1), layout, group)
        for i, part in zip(places, joined.split([x.shape[-1] for x in flat], dim=-1)):
            whole[i] = part.unflatten(-1, inputs[i].shape[3:]) if inputs[i].dim() > 3 else part[..., 0]
    return tuple(whole)
