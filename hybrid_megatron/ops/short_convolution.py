"""Causal depthwise convolution over a few tokens as a sum of shifted products, the sequence whole or cut over context ranks."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_megatron.parallel import SequenceLayout
from hybrid_megatron.parallel.halo import preceding_tokens


def short_convolution(x: Tensor, weight: Tensor, layout: SequenceLayout, context_group: ProcessGroup | None) -> Tensor:
    """y_t = sum_i weight[:, width - 1 - i] x_{t - i} for i = 0 .. width - 1; zeros stand before the sample and before t's document.

    x [b, s, c], s the local length; weight [c, width], its last tap for the token itself (as Conv1d's, padded on the left). Returns
    [b, s, c] in x's dtype, summed in float32 or wider. With context parallelism the width - 1 tokens before each chunk are exchanged.
    """
    work = torch.promote_types(x.dtype, torch.float32)
    width = weight.shape[1]
    taps = weight.to(work).unbind(1)
    ages = layout.once("tokens since document start", lambda: _tokens_since_document_start(layout))
    outputs = []
    for chunk, before, tokens in zip(
        layout.chunks, preceding_tokens(x, width - 1, layout, context_group), x.split(layout.chunk_length, dim=1)
    ):
        zeros = x.new_zeros(x.shape[0], width - 1 - before.shape[1], x.shape[2])
        padded = torch.cat((zeros, before, tokens), dim=1).to(work)
        age = None if ages is None else ages[:, chunk * layout.chunk_length : (chunk + 1) * layout.chunk_length, None]
        outputs.append(_convolve(padded, taps, age).to(x.dtype))
    return torch.cat(outputs, dim=1)


def _convolve(padded: Tensor, taps: tuple[Tensor, ...], age: Tensor | None) -> Tensor:
    """padded [b, width - 1 + s, c]; age [b, s, 1], tokens of its document before each token, or None. Returns [b, s, c]."""
    back = len(taps) - 1
    y = padded[:, back:] * taps[back]
    for distance in range(1, len(taps)):
        product = padded[:, back - distance : padded.shape[1] - distance] * taps[back - distance]
        y = y + (product if age is None else torch.where(age >= distance, product, 0.0))
    return y


def _tokens_since_document_start(layout: SequenceLayout) -> Tensor | None:
    """[b, context], counted from the sample's start where no document began before; None without documents."""
    if layout.document_starts is None:
        return None
    position = torch.arange(layout.context, device=layout.document_starts.device)
    return position - torch.where(layout.document_starts, position, 0).cummax(dim=1).values
