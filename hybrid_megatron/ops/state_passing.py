"""Linear recurrences over context ranks: each rank runs its own chunks, and only states travel.

A chunk's effect on the state is affine: S_out = M S_in + U. In the forward pass every rank computes (M, U) of its chunks, one all-gather
makes all of them known, and each rank folds those before its chunks, in sequence order, into the states that its chunks start from. The
backward pass goes the other way: if dS is the gradient of S_out, and R that of S_in by the chunk's own outputs, dS_in = M^T dS + R. Every
rank computes R of its chunks, one all-gather makes them known, and those of the chunks behind one's own are folded into the gradients of
the states that one's own end in, which is all that the recurrence's own backward pass lacks. M, U and R come from passes over states
alone. The bytes sent do not depend on the length, and heads need not divide by the number of ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_megatron.ops.recurrence import Recurrence
from hybrid_megatron.ops.row_copy import batch_first
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
        return x.unflatten(1, (len(layout.chunks), -1)).transpose(0, 1).flatten(0, 1)

    inputs = tuple(by_chunk(batch_first(x)) for x in inputs)
    starts = None if starts is None else by_chunk(starts)
    transitions, initial = _states_of_local_chunks(recurrence, inputs, starts, layout, group)
    o, last = recurrence.run(inputs, scale=scale, initial_state=initial, document_starts=starts)
    chain = _Chain(recurrence, scale, starts, layout, group)
    o = _WithLaterChunks.apply(o, last, chain, len(transitions), *transitions, *inputs)
    return o.unflatten(0, (len(layout.chunks), -1)).transpose(0, 1).flatten(1, 2)


@torch.no_grad()
def _states_of_local_chunks(
    recurrence: Recurrence, inputs: tuple[Tensor, ...], starts: Tensor | None, layout: SequenceLayout, group: ProcessGroup
) -> tuple[list[Tensor], Tensor]:
    """(the transition of each of the sample's chunks, in sequence order; the states that the local chunks start from [chunks * b, ...])."""
    transition, added = recurrence.summary(inputs, starts)
    batch = added.shape[0] // len(layout.chunks)
    known = recurrence.constant_transition and starts is None  # then every rank's is the same
    parts = [added] if known else [added, transition]
    joined = torch.cat([x.flatten(2) for x in parts], dim=-1)
    pieces = [piece.split([x.shape[2:].numel() for x in parts], dim=-1) for piece in _of_all_chunks(joined, layout, group)]
    transitions = [transition[:batch] if known else piece[1].unflatten(2, transition.shape[2:]) for piece in pieces]
    state = torch.zeros_like(added[:batch])
    states = []
    for passed, piece in zip(transitions[: max(layout.chunks) + 1], pieces):
        states.append(state)
        state = recurrence.apply(passed, state) + piece[0].unflatten(2, added.shape[2:])
    return transitions, torch.cat([states[chunk] for chunk in layout.chunks], dim=0)


def _of_all_chunks(local: Tensor, layout: SequenceLayout, group: ProcessGroup) -> list[Tensor]:
    """[b, ...] of each of the sample's chunks, in sequence order, from those of the local ones [chunks * b, ...]."""
    pieces = gather_from_sequence_parallel_region(local.contiguous(), group=group).split(local.shape[0] // len(layout.chunks), dim=0)
    return [pieces[place] for place in gathered_order(layout.size)]


@dataclass(frozen=True)
class _Chain:
    """What the backward pass needs beside the tensors that are kept for it."""

    recurrence: Recurrence
    scale: float
    starts: Tensor | None
    layout: SequenceLayout
    group: ProcessGroup

    def gradients_of_last_states(self, grad: Tensor, transitions: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> Tensor:
        """[chunks * b, n, K, V] of the states that the local chunks end in, from the gradient of their outputs."""
        own = self.recurrence.initial_state_gradient(inputs, grad, scale=self.scale, document_starts=self.starts)
        of_all = _of_all_chunks(own, self.layout, self.group)
        later = torch.zeros_like(of_all[0])
        found = {}
        for chunk in reversed(range(min(self.layout.chunks), len(of_all))):
            found[chunk] = later
            later = self.recurrence.apply_back(transitions[chunk], later) + of_all[chunk]
        return torch.cat([found[chunk] for chunk in self.layout.chunks], dim=0)


class _WithLaterChunks(torch.autograd.Function):
    """The output as it is. Its backward pass gives the last states the gradients that the chunks after them have for them."""

    @staticmethod
    def forward(ctx, o: Tensor, last: Tensor, chain: _Chain, count: int, *kept: Tensor) -> Tensor:
        ctx.chain, ctx.count = chain, count
        ctx.save_for_backward(*kept)  # of `count` transitions, and the inputs
        return o.view_as(o)

    @staticmethod
    def backward(ctx, grad: Tensor):
        transitions, inputs = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        of_last = ctx.chain.gradients_of_last_states(grad, transitions, inputs)
        return grad, of_last, None, None, *(None for _ in ctx.saved_tensors)
