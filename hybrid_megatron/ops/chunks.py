"""Sequences cut into chunks of tokens: what the recurrences' forms for the CPU share."""

import torch
import torch.nn.functional as F
from torch import Tensor


def cut(x: Tensor, chunk: int, dtype: torch.dtype) -> Tensor:
    """[b, s, n, ...] -> [b, n, count, chunk, ...] in `dtype`, with zeros after the last token."""
    x = F.pad(x.to(dtype), (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % chunk))
    return x.unflatten(1, (-1, chunk)).movedim(3, 1)


def join(x: Tensor, length: int) -> Tensor:
    """[b, n, count, chunk, w] -> [b, length, n, w]: the inverse of `cut`."""
    return x.flatten(2, 3)[:, :, :length].transpose(1, 2)


def visible(document_starts: Tensor | None, chunk: int, device: torch.device) -> Tensor:
    """What each token of a chunk sees: in place 0 the state that enters the chunk, in place j + 1 the chunk's token j.

    [chunk, chunk + 1] bool, or [b, 1, count, chunk, chunk + 1] with documents: nothing reaches across a document start.
    """
    causal = torch.ones(chunk, chunk + 1, dtype=torch.bool, device=device).tril(1)
    if document_starts is None:
        return causal
    starts = F.pad(document_starts, (0, -document_starts.shape[1] % chunk))
    document = starts.unflatten(1, (-1, chunk)).long().cumsum(-1)[:, None]
    seen = F.pad(document, (1, 0))  # what enters is of document 0
    return causal & (document[..., :, None] == seen[..., None, :])
