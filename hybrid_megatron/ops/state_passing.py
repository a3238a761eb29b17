"""Linear recurrences over pieces of a sample, on one rank or on several: each piece runs by itself, and only states pass between them.

A piece's effect on the state is affine: S_out = M S_in + U. In the forward pass (M, U) of every piece, folded in sequence order, gives the
state that each piece starts from. The backward pass goes the other way: if dS is the gradient of S_out, and R that of S_in by the piece's
own outputs, dS_in = M^T dS + R, which gives the gradient of the state that each piece ends in, all that the recurrence's own backward pass
lacks. M, U and R come from passes over states alone.

Context ranks hold two chunks of the sample each and tell each other the (M, U) and R of these, in one all-gather each way: the bytes sent
do not depend on the length, and heads need not divide by the number of ranks. On a GPU a chunk is cut further, where samples and heads
are too few to fill it: the kernels go through a piece from beginning to end, and through all pieces side by side.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_megatron.ops.recurrence import KERNEL_CHUNK, Recurrence
from hybrid_megatron.ops.row_copy import batch_first
from hybrid_megatron.parallel import SequenceLayout
from hybrid_megatron.parallel.sequence_layout import gathered_order
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

_SIDE_BY_SIDE = 128
"""Heads of samples, or of pieces of them, at most: each is a few programs of a kernel, and an H200 has 132 multiprocessors."""
_SHORTEST = 2048
"""Tokens of a piece at least."""


def recurrence_over_ranks(
    recurrence: Recurrence, inputs: tuple[Tensor, ...], scale: float, layout: SequenceLayout, group: ProcessGroup
) -> Tensor:
    """o [b, s, n, V] of the recurrence for the local tokens; inputs [b, s, n, ...] as it takes them, s the local length."""
    assert inputs[0].shape[1] == layout.local_length, f"{inputs[0].shape[1]} tokens under a layout of {layout.local_length}"
    starts = layout.local_document_starts()
    chain = _Chain(recurrence, scale, layout, group, len(layout.chunks) * pieces_of_a_chunk(recurrence, inputs[0], layout))
    if chain.pieces == 1:
        return recurrence.run(inputs, scale=scale, document_starts=starts)[0]
    inputs = tuple(chain.cut(batch_first(x)) for x in inputs)
    starts = None if starts is None else layout.once(("document starts", chain.pieces), lambda: chain.cut(starts))
    transitions, initial = chain.first_states(inputs, starts)
    o, last = recurrence.run(inputs, scale=scale, initial_state=initial, document_starts=starts)
    o = _WithWhatFollows.apply(o, last, chain, starts, len(transitions), *transitions, *inputs)
    return o.unflatten(0, (-1, chain.pieces)).flatten(1, 2)


def pieces_of_a_chunk(recurrence: Recurrence, q: Tensor, layout: SequenceLayout) -> int:
    """Into how many it is cut: one, unless passes over states are cheap here. q [b, s, n, K]. With gradients or without, the same number,
    so that what a backward pass computes again comes out the same."""
    if not (recurrence.states_by_kernels and q.is_cuda):
        return 1
    return pieces_side_by_side(q.shape[0] * len(layout.chunks) * q.shape[2], layout.chunk_length)


def pieces_side_by_side(chains: int, length: int) -> int:
    """Into how many each of so many heads of samples' chunks is cut, of `length` tokens, where passes over states are cheap."""
    pieces = 1
    while 2 * pieces * chains <= _SIDE_BY_SIDE and length >= 2 * pieces * _SHORTEST and length % (2 * pieces * KERNEL_CHUNK) == 0:
        pieces *= 2
    return pieces


@dataclass(frozen=True)
class _Chain:
    """The local pieces of samples, batch entries [b * pieces, ...] of the recurrence: those of a sample one after the other."""

    recurrence: Recurrence
    scale: float
    layout: SequenceLayout
    group: ProcessGroup
    pieces: int
    """Of a sample, of all local chunks."""

    def cut(self, x: Tensor) -> Tensor:
        """[b, s, ...] -> [b * pieces, ...]."""
        return x.unflatten(1, (self.pieces, -1)).flatten(0, 1)

    def _by_place(self, x: Tensor) -> list[list[Tensor]]:
        """[b * pieces, ...] -> of each local chunk, of each of its pieces: [b, ...]."""
        chunks = x.unflatten(0, (-1, len(self.layout.chunks), self.pieces // len(self.layout.chunks))).unbind(1)
        return [list(chunk.unbind(1)) for chunk in chunks]

    @torch.no_grad()
    def first_states(self, inputs: tuple[Tensor, ...], starts: Tensor | None) -> tuple[list[Tensor], Tensor]:
        """(transitions: [b * pieces, ...] of the local pieces and, on several ranks, of each of the sample's chunks; the states that the
        local pieces start from [b * pieces, n, K, V])."""
        transition, added = self.recurrence.summary(inputs, starts)
        by_piece = [list(zip(*each)) for each in zip(self._by_place(transition), self._by_place(added))]
        transitions = [transition]
        if self.layout.size == 1:
            firsts = [torch.zeros_like(by_piece[0][0][1])]
        else:
            firsts, of_chunks = self._first_states_of_chunks([self._together(chunk) for chunk in by_piece], starts)
            transitions += of_chunks
        states = []
        for state, chunk in zip(firsts, by_piece):
            for passed, own in chunk:
                states.append(state)
                state = self.recurrence.apply(passed, state, own)
        return transitions, torch.stack(states, dim=1).flatten(0, 1)

    def _together(self, pieces: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """(transition, added) of pieces that follow each other."""
        (transition, added), *rest = pieces
        for passed, own in rest:
            transition, added = self.recurrence.apply(passed, transition), self.recurrence.apply(passed, added, own)
        return transition, added

    def _first_states_of_chunks(self, local: list[tuple[Tensor, Tensor]], starts: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
        """(the states that the local chunks start from, the transition of each of the sample's chunks in sequence order)."""
        transition, added = local[0]
        known = self.recurrence.constant_transition and starts is None  # then every chunk's is the same
        parts = [[added] if known else [added, transition] for transition, added in local]
        sizes = [x.shape[2:].numel() for x in parts[0]]
        told = self._of_all_chunks([torch.cat([x.flatten(2) for x in each], dim=-1) for each in parts])
        pieces = [x.split(sizes, dim=-1) for x in told]
        transitions = [transition if known else piece[1].unflatten(2, transition.shape[2:]) for piece in pieces]
        state, states = torch.zeros_like(added), []
        for passed, piece in zip(transitions[: max(self.layout.chunks) + 1], pieces):
            states.append(state)
            state = self.recurrence.apply(passed, state, piece[0].unflatten(2, added.shape[2:]))
        return [states[chunk] for chunk in self.layout.chunks], transitions

    def gradients_of_last_states(
        self, grad: Tensor, transitions: tuple[Tensor, ...], inputs: tuple[Tensor, ...], starts: Tensor | None
    ) -> Tensor:
        """[b * pieces, n, K, V] of the states that the local pieces end in, from the gradient of their outputs."""
        own = self.recurrence.initial_state_gradient(inputs, grad, scale=self.scale, document_starts=starts)
        by_piece = [list(zip(*each)) for each in zip(self._by_place(transitions[0]), self._by_place(own))]
        if self.layout.size == 1:
            lasts = [torch.zeros_like(by_piece[0][0][1])]
        else:
            lasts = self._gradients_of_last_states_of_chunks([self._back_through(chunk) for chunk in by_piece], transitions[1:])
        found = []
        for later, chunk in zip(reversed(lasts), reversed(by_piece)):
            for passed, mine in reversed(chunk):
                found.append(later)
                later = self.recurrence.apply_back(passed, later, mine)
        return torch.stack(found[::-1], dim=1).flatten(0, 1)

    def _back_through(self, pieces: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The gradient of the state before pieces that follow each other, by their own outputs."""
        *rest, (_, grad) = pieces
        for passed, mine in reversed(rest):
            grad = self.recurrence.apply_back(passed, grad, mine)
        return grad

    def _gradients_of_last_states_of_chunks(self, local: list[Tensor], transitions: tuple[Tensor, ...]) -> list[Tensor]:
        of_all = self._of_all_chunks(local)
        later, found = torch.zeros_like(of_all[0]), {}
        for chunk in reversed(range(min(self.layout.chunks), len(of_all))):
            found[chunk] = later
            later = self.recurrence.apply_back(transitions[chunk], later, of_all[chunk])
        return [found[chunk] for chunk in self.layout.chunks]

    def _of_all_chunks(self, local: list[Tensor]) -> list[Tensor]:
        """[b, ...] of each of the sample's chunks, in sequence order, from those of the local ones."""
        gathered = gather_from_sequence_parallel_region(torch.stack(local), group=self.group)
        return [gathered[place] for place in gathered_order(self.layout.size)]


class _WithWhatFollows(torch.autograd.Function):
    """The output as it is. Its backward pass gives the last states the gradients that the pieces after them have for them."""

    @staticmethod
    def forward(ctx, o: Tensor, last: Tensor, chain: _Chain, starts: Tensor | None, count: int, *kept: Tensor) -> Tensor:
        ctx.chain, ctx.starts, ctx.count = chain, starts, count
        ctx.save_for_backward(*kept)  # of `count` transitions, and the inputs
        return o.view_as(o)

    @staticmethod
    def backward(ctx, grad: Tensor):
        transitions, inputs = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        of_last = ctx.chain.gradients_of_last_states(grad, transitions, inputs, ctx.starts)
        return grad, of_last, None, None, None, *(None for _ in ctx.saved_tensors)
