"""embedding.py's rows and the sums of their gradients as Triton kernels. Each row is read once, and each sum added by one program: there
are no atomic additions, so results are the same each time.

Sorted tokens are runs of equal words. A frequent word has thousands of rows, most have one or two: so places in that order are cut into
pieces of equal length, and a program sums the part of a run that lies in its piece. The part that begins the run goes to the word's sum,
those that continue it stand for rows of a next round, over as many places as there are pieces.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIECE = 32  # places
_ROWS = 8  # of a run that a program has on their way at once
_COLUMNS = 512  # the same: 16 bytes a thread and row in bf16, so that a column's sum stays in a thread
_WARPS = 2


@triton.jit
def _embedding_rows(tokens, weight, out, first, words, width, BLOCK: tl.constexpr):
    """A program a token."""
    place = tl.program_id(0).to(tl.int64)
    word = tl.load(tokens + place) - first
    column = tl.arange(0, BLOCK)
    inside = column < width
    own = (word >= 0) & (word < words)
    tl.store(out + place * width + column, tl.load(weight + word * width + column, mask=inside & own, other=0.0), mask=inside)


@triton.jit
def _embedding_gradient(
    rows, order, tokens, total, sums, tokens_of_sums, count, first, words, width,
    ORDERED: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program a place of `count`; without anything to do, unless a run begins there, or a piece. Place i has row order[i], or row i;
    `sums` and `tokens_of_sums` have one for each piece, and -1 stands for no token."""
    place = tl.program_id(0)
    piece = place // PIECE
    token = tl.load(tokens + place)
    own = (token >= first) & (token < first + words)
    begins = tl.load(tokens + place - 1, mask=place > 0, other=-1) != token
    opens = place == piece * PIECE
    if opens:
        tl.store(tokens_of_sums + piece, tl.where(own & (begins == 0), token, -1))
    if own & (begins | opens):
        ahead = place + tl.arange(0, PIECE)
        inside = (ahead < count) & (ahead < (piece + 1) * PIECE)
        length = tl.sum((tl.load(tokens + ahead, mask=inside, other=-1) == token).to(tl.int32), axis=0)
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            added = tl.zeros((COLUMNS,), total.dtype.element_ty)
            for done in range(0, length, ROWS):
                number = done + tl.arange(0, ROWS)
                row = place + number
                if ORDERED:
                    row = tl.load(order + row, mask=number < length, other=0)
                source = rows + row.to(tl.int64)[:, None] * width + column[None, :]
                some = tl.load(source, mask=(number < length)[:, None] & (column < width)[None, :], other=0.0)
                added += tl.sum(some.to(total.dtype.element_ty), axis=0)
            if begins:
                target = total + (token - first).to(tl.int64) * width + column
                tl.store(target, tl.load(target, mask=column < width, other=0.0) + added, mask=column < width)
            else:
                tl.store(sums + piece.to(tl.int64) * width + column, added, mask=column < width)


def rows_of(tokens: Tensor, weight: Tensor, first: int) -> Tensor:
    """[..., h] from tokens [...] and weight [words, h], of which `first` is the first: see embedding.py."""
    tokens, weight, (words, width) = tokens.contiguous(), weight.contiguous(), weight.shape
    out, block = torch.empty(*tokens.shape, width, dtype=weight.dtype, device=weight.device), triton.next_power_of_2(width)
    _embedding_rows[(tokens.numel(),)](
        tokens, weight, out, first, words, width, BLOCK=block, num_warps=min(max(block // 512, 1), 8)
    )  # fmt: skip
    return out


def add_rows_(total: Tensor, tokens: Tensor, rows: Tensor, first: int) -> None:
    """total[token - first] += row for each of tokens [...] that is one of the words of total [words, h], contiguous, and its row of
    rows [..., h]; summed in the type of total, and word numbers below 2^31."""
    assert total.is_contiguous()
    words, width = total.shape
    rows, (tokens, order) = rows.contiguous(), torch.sort(tokens.flatten().to(torch.int32), stable=True)
    ordered = True
    while True:
        count = len(tokens)
        pieces = triton.cdiv(count, _PIECE)
        sums, tokens_of_sums = total.new_empty(pieces, width), tokens.new_empty(pieces)
        _embedding_gradient[(count,)](
            rows, order, tokens, total, sums, tokens_of_sums, count, first, words, width,
            ORDERED=ordered, PIECE=_PIECE, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=_WARPS,
        )  # fmt: skip
        if pieces <= 1:
            return
        rows, tokens, ordered = sums, tokens_of_sums, False
