"""Documents within rows, as FLA's kernels take them: variable-length sequences, those of all rows one after the other."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.ops.row_copy import batch_first


class Sequences(NamedTuple):
    """Of rows [b, s] laid one after the other."""

    borders: Tensor
    """FLA's cu_seqlens: where each begins, and the end of the last."""
    first: Tensor
    """[b] each row's first one, which may go on from before the row."""
    last: Tensor
    """[b] each row's last one."""


@lru_cache(maxsize=16)
def sequences_of(document_starts: Tensor) -> Sequences:
    """document_starts [b, s] bool. A row's first token begins a sequence whether a document starts there or not.

    The host waits for the number of documents, so this is done once for a tensor, by its identity: all layers of a micro-batch have the
    same one (SequenceLayout.once), and FLA's own tables go by the identity of `borders`.
    """
    batch, length = document_starts.shape
    begins = document_starts.clone()
    begins[:, 0] = True
    flat = begins.flatten().nonzero()[:, 0]
    rows = torch.arange(batch + 1, device=flat.device) * length
    first = torch.searchsorted(flat, rows)
    return Sequences(F.pad(flat, (0, 1), value=batch * length), first[:-1], first[1:] - 1)


def over_documents(
    kernel: Callable[..., tuple[Tensor, Tensor]], inputs: Sequence[Tensor], initial_state: Tensor | None, document_starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(o [b, s, n, V], final state [b, n, K, V]) of an FLA kernel on inputs [b, s, n, ...], each document from a zero state.

    `kernel` takes the inputs, initial_state and, given document starts [b, s] bool, cu_seqlens. A row whose first token does not begin a
    document continues one: it starts from its initial state.
    """
    inputs = [batch_first(x) for x in inputs]
    if document_starts is None:
        return kernel(*inputs, initial_state=initial_state)

    sequences, states = sequences_of(document_starts), None
    if initial_state is not None:
        states = initial_state.new_zeros(len(sequences.borders) - 1, *initial_state.shape[1:])
        states = states.index_copy(0, sequences.first, initial_state.masked_fill(document_starts[:, :1, None, None], 0.0))
    o, final = kernel(*(x.flatten(0, 1)[None] for x in inputs), initial_state=states, cu_seqlens=sequences.borders)
    return o.unflatten(1, document_starts.shape)[0], final[sequences.last]
