"""Documents within rows, as FLA's kernels take them: variable-length sequences, those of all rows one after the other."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def over_documents(
    kernel: Callable[..., tuple[Tensor, Tensor]], inputs: Sequence[Tensor], initial_state: Tensor | None, document_starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(o [b, s, n, V], final state [b, n, K, V]) of an FLA kernel on inputs [b, s, n, ...], each document from a zero state.

    `kernel` takes the inputs, initial_state and, given document starts [b, s] bool, cu_seqlens. A row whose first token does not begin a
    document continues one: it starts from its initial state.
    """
    inputs = [x.contiguous() for x in inputs]
    if document_starts is None:
        return kernel(*inputs, initial_state=initial_state)

    batch, length = document_starts.shape
    begins = document_starts.clone()
    begins[:, 0] = True
    flat = begins.flatten().nonzero()[:, 0]
    states = None
    if initial_state is not None:
        first = torch.searchsorted(flat, torch.arange(batch, device=flat.device) * length)
        states = initial_state.new_zeros(len(flat), *initial_state.shape[1:])
        states = states.index_copy(0, first, initial_state.masked_fill(document_starts[:, :1, None, None], 0.0))
    o, final = kernel(
        *(x.flatten(0, 1)[None] for x in inputs), initial_state=states, cu_seqlens=F.pad(flat, (0, 1), value=batch * length)
    )  # fmt: skip
    last = torch.searchsorted(flat, torch.arange(1, batch + 1, device=flat.device) * length) - 1
    return o.unflatten(1, (batch, length))[0], final[last]
