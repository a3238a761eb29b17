"""Linear recurrences over context ranks: each rank runs its own chunks, and only states travel.

A chunk's effect on the state is affine: S_out = M S_in + U. Every rank computes (M, U) of its chunks from a zero state, one all-gather
makes all of them known, and each rank folds those before its chunks, in sequence order, into the states that its chunks start from. The
bytes sent do not depend on the length, and heads need not divide by the number of ranks. The gather is differentiable, so the backward
pass (dS_in = M^T dS_out, summed over the ranks that used a summary) follows by itself.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_megatron.ops.recurrence import Recurrence
from hybrid_megatron.parallel import SequenceLayout
from hybrid_megatron.parallel.sequence_layout import gathered_order
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


def recurrence_over_ranks(
    recurrence: Recurrence, inputs: tuple[Tensor, ...], scale: float, layout: SequenceLayout, group: ProcessGroup
) -> Tensor:
    """o [b, s, n, V] of the recurrence for the local tokens; inputs [b, s, n, ...] as it takes them, s the local length."""
    assert inputs[0].shape[1] == layout.local_length, f"{inputs[0].shape[1]} tokens under a layout of {layout.local_length}"
    starts = layout.local_document_starts()
    if layout.size == 1:
        return recurrence.run(inputs, scale=scale, document_starts=starts)[0]

    # The local chunks become batch entries [chunks * b, ...]: each has its own starting state.
    def by_chunk(x: Tensor) -> Tensor:
        return torch.cat(x.split(layout.chunk_length, dim=1), dim=0)

    inputs = tuple(by_chunk(x) for x in inputs)
    starts = None if starts is None else by_chunk(starts)
    summaries = _summaries_of_all_chunks(recurrence, inputs, starts, layout, group)
    state = torch.zeros_like(summaries[0][1])
    states = []
    for transition, added in summaries[: max(layout.chunks) + 1]:
        states.append(state)
        state = recurrence.apply(transition, state) + added
    initial = torch.cat([states[chunk] for chunk in layout.chunks], dim=0)
    o, _ = recurrence.run(inputs, scale=scale, initial_state=initial, document_starts=starts)
    return torch.cat(o.chunk(len(layout.chunks), dim=0), dim=1)


def _summaries_of_all_chunks(
    recurrence: Recurrence, inputs: tuple[Tensor, ...], starts: Tensor | None, layout: SequenceLayout, group: ProcessGroup
) -> list[tuple[Tensor, Tensor]]:
    """(transition, added) of each of the sample's chunks, in sequence order; inputs and starts are the local chunks, [chunks * b, ...]."""
    transition, added = recurrence.summary(inputs, starts)
    batch = added.shape[0] // len(layout.chunks)
    known = recurrence.constant_transition and starts is None  # then every rank's is the same
    parts = [added] if known else [added, transition]
    joined = torch.cat([x.flatten(2) for x in parts], dim=-1).contiguous()
    gathered = gather_from_sequence_parallel_region(joined, tensor_parallel_output_grad=True, group=group).split(batch, dim=0)
    summaries = []
    for place in gathered_order(layout.size):
        sizes = [x.shape[2:].numel() for x in parts]
        pieces = [x.unflatten(2, part.shape[2:]) for x, part in zip(gathered[place].split(sizes, dim=-1), parts)]
        summaries.append((transition[:batch] if known else pieces[1], pieces[0]))
    return summaries
