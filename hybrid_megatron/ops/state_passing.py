"""Linear recurrences over context ranks: each rank runs its own chunks, and only states travel.

A chunk's effect on the state is affine: S_out = M S_in + U. Every rank computes (M, U) of its chunks from a zero state, one all-gather
makes all of them known, and each rank folds those before its chunks, in sequence order, into the states that its chunks start from. The
bytes sent do not depend on the length, and heads need not divide by the number of ranks. The gather is differentiable, so the backward
pass (dS_in = M^T dS_out, summed over the ranks that used a summary) follows by itself.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_megatron.ops.gated_delta_rule import gated_delta_rule
from hybrid_megatron.parallel import SequenceLayout
from hybrid_megatron.parallel.sequence_layout import gathered_order
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


def gated_delta_rule_over_ranks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, layout: SequenceLayout, group: ProcessGroup
) -> Tensor:
    """o [b, s, n, V] of the gated delta rule for the local tokens; shapes as in ops/gated_delta_rule.py, s the local length."""
    assert q.shape[1] == layout.local_length, f"{q.shape[1]} tokens under a layout of {layout.local_length}"
    starts = layout.local_document_starts()
    if layout.size == 1:
        return gated_delta_rule(q, k, v, g, beta, scale=scale, document_starts=starts)[0]

    # The local chunks become batch entries [chunks * b, ...]: each has its own starting state.
    count, length = len(layout.chunks), layout.chunk_length

    def by_chunk(x: Tensor) -> Tensor:
        return torch.cat(x.split(length, dim=1), dim=0)

    q, k, v, g, beta = (by_chunk(x) for x in (q, k, v, g, beta))
    starts = None if starts is None else by_chunk(starts)

    # M by the same recurrence: with values [v | 0] and initial state [0 | I], the final state is [U | M].
    width_k, width_v = k.shape[-1], v.shape[-1]
    identity = torch.eye(width_k, device=k.device).expand(k.shape[0], k.shape[2], width_k, width_k)
    start = torch.cat((identity.new_zeros(*identity.shape[:3], width_v), identity), dim=-1)
    padded = torch.cat((v, v.new_zeros(*v.shape[:-1], width_k)), dim=-1)
    _, summary = gated_delta_rule(q, k, padded, g, beta, scale=scale, initial_state=start, document_starts=starts)

    gathered = gather_from_sequence_parallel_region(summary.contiguous(), tensor_parallel_output_grad=True, group=group)
    pieces = gathered.split(summary.shape[0] // count, dim=0)
    in_order = [pieces[place] for place in gathered_order(layout.size)]
    state = torch.zeros_like(in_order[0][..., :width_v])
    states = []
    for piece in in_order[: max(layout.chunks) + 1]:
        states.append(state)
        add, transition = piece.split((width_v, width_k), dim=-1)
        state = transition @ state + add
    initial = torch.cat([states[chunk] for chunk in layout.chunks], dim=0)
    o, _ = gated_delta_rule(q, k, v, g, beta, scale=scale, initial_state=initial, document_starts=starts)
    return torch.cat(o.chunk(count, dim=0), dim=1)
