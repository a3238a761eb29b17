"""token_shift.py's mixes and their gradients as Triton kernels: x and the gradients are read once, computed in float32, and the results
written once. The token before is read from x itself, and never stands in memory as a tensor of its own."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_megatron.ops.kernels.row_layout import dense_rows, empty_like, lies_sequence_first

_TOKENS = 4  # of a program forward
_CHANNELS = 128  # of a program: one warp, and few enough for the sums of six mixes to stay in registers
_PROGRAMS = 2560  # about as many in the backward pass: each has sums of its own for the mixes


@triton.jit
def _before(
    x, first, starts, batch, token, column, inside, tokens, chunk, chunks, width, x_batch, x_token, STARTS: tl.constexpr
):  # fmt: skip
    """(the tokens before these, whether each begins a chunk, whether one comes before it): zeros at document starts."""
    begins = token % chunk == 0
    follows = token < tokens
    if STARTS:
        follows = follows & (tl.load(starts + batch * tokens + token, mask=follows, other=1) == 0)
    within = tl.load(x + batch * x_batch + (token - 1).to(tl.int64) * x_token + column, mask=inside & follows & ~begins, other=0.0)
    given = tl.load(first + (batch * chunks + token // chunk) * width + column, mask=inside & follows & begins, other=0.0)
    return tl.where(begins, given, within).to(tl.float32), begins, follows


@triton.jit
def _token_shift(
    x, first, starts, mixes, out, samples, tokens, chunk, chunks, width, blocks, x_batch, x_token,
    MIXES: tl.constexpr, STARTS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A program TOKENS tokens of a sample in CHANNELS channels, of `blocks` times as many; out [MIXES, b, s, h]."""
    block, batch = tl.program_id(0) // blocks, tl.program_id(1).to(tl.int64)
    token = (block * TOKENS + tl.arange(0, TOKENS))[:, None]
    column = ((tl.program_id(0) - block * blocks) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    inside = (token < tokens) & (column < width)
    here = tl.load(x + batch * x_batch + token.to(tl.int64) * x_token + column, mask=inside, other=0.0).to(tl.float32)
    before, _, _ = _before(x, first, starts, batch, token, column, inside, tokens, chunk, chunks, width, x_batch, x_token, STARTS)
    for i in tl.static_range(MIXES):
        mix = tl.load(mixes + i * width + column, mask=column < width, other=0.0).to(tl.float32)
        target = ((i * samples + batch) * tokens + token) * width + column
        tl.store(out + target, (here + mix * (before - here)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _token_shift_gradients(
    grads, x, first, starts, mixes, of_x, of_first, sums, samples, tokens, tokens_each, chunk, chunks, width, blocks,
    x_batch, x_token, of_x_batch, of_x_token,
    MIXES: tl.constexpr, STARTS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A program `tokens_each` tokens of a sample in CHANNELS channels, from the last to the first: what a token's mix with the one before
    it sends back there is at hand when that one's turn comes. grads [MIXES, b, s, h]."""
    block, batch = tl.program_id(0) // blocks, tl.program_id(1).to(tl.int64)
    column = (tl.program_id(0) - block * blocks) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < width
    mix, totals = (), ()
    for i in tl.static_range(MIXES):
        mix += (tl.load(mixes + i * width + column, mask=inside, other=0.0).to(tl.float32),)
        totals += (tl.zeros((CHANNELS,), tl.float32),)

    begin = (block * tokens_each).to(tl.int64)
    end = tl.minimum(begin + tokens_each, tokens)
    _, begins, follows = _before(x, first, starts, batch, end, column, inside, tokens, chunk, chunks, width, x_batch, x_token, STARTS)
    sent_back = tl.zeros((CHANNELS,), tl.float32)
    for i in tl.static_range(MIXES):
        source = grads + ((i * samples + batch) * tokens + end) * width + column
        sent_back += mix[i] * tl.load(source, mask=inside & follows & ~begins, other=0.0).to(tl.float32)
    for turn in range(0, end - begin):
        token = end - 1 - turn
        here = tl.load(x + batch * x_batch + token * x_token + column, mask=inside, other=0.0).to(tl.float32)
        before, begins, follows = _before(
            x, first, starts, batch, token, column, inside, tokens, chunk, chunks, width, x_batch, x_token, STARTS
        )
        both, of_before, sums_so_far = tl.zeros((CHANNELS,), tl.float32), tl.zeros((CHANNELS,), tl.float32), ()
        for i in tl.static_range(MIXES):
            source = grads + ((i * samples + batch) * tokens + token) * width + column
            g = tl.load(source, mask=inside, other=0.0).to(tl.float32)
            both += g
            of_before += mix[i] * g
            sums_so_far += (totals[i] + (before - here) * g,)
        totals = sums_so_far
        of_here = both - of_before + sent_back
        tl.store(of_x + batch * of_x_batch + token * of_x_token + column, of_here.to(of_x.dtype.element_ty), mask=inside)
        of_before = tl.where(follows, of_before, 0.0)
        target = of_first + (batch * chunks + token // chunk) * width + column
        tl.store(target, of_before.to(of_first.dtype.element_ty), mask=inside & begins)
        sent_back = tl.where(begins, 0.0, of_before)
    program = batch * (tl.num_programs(0) // blocks) + block
    for i in tl.static_range(MIXES):
        tl.store(sums + (program * MIXES + i) * width + column, totals[i], mask=inside)


def mixed(x: Tensor, first: Tensor, starts: Tensor | None, mixes: Tensor) -> Tensor:
    """[mixes, b, s, h], contiguous, from x [b, s, h], first [b, chunks, h], starts [b, s] and mixes [mixes, h]: see token_shift.py."""
    x, first, mixes = dense_rows(x), first.contiguous(), mixes.contiguous()
    batch, tokens, width = x.shape
    out = torch.empty(len(mixes), *x.shape, dtype=x.dtype, device=x.device)
    blocks, chunks = triton.cdiv(width, _CHANNELS), first.shape[1]
    _token_shift[(triton.cdiv(tokens, _TOKENS) * blocks, batch)](
        x, first, _bytes(starts, x), mixes, out, batch, tokens, tokens // chunks, chunks, width, blocks, *x.stride()[:2],
        MIXES=len(mixes), STARTS=starts is not None, TOKENS=_TOKENS, CHANNELS=_CHANNELS, num_warps=1,
    )  # fmt: skip
    return out


def gradients(grads: Tensor, x: Tensor, first: Tensor, starts: Tensor | None, mixes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of x, as it lies, first and mixes, from those of `mixed` [mixes, b, s, h]."""
    grads, x, first, mixes = grads.contiguous(), dense_rows(x), first.contiguous(), mixes.contiguous()
    batch, tokens, width = x.shape
    blocks, chunks = triton.cdiv(width, _CHANNELS), first.shape[1]
    tokens_each = triton.cdiv(batch * tokens * blocks, _PROGRAMS)
    programs = triton.cdiv(tokens, tokens_each)
    of_x, of_first = empty_like(x, sequence_first=lies_sequence_first(x)), torch.empty_like(first)
    sums = torch.empty(batch * programs, *mixes.shape, dtype=torch.float32, device=x.device)
    _token_shift_gradients[(programs * blocks, batch)](
        grads, x, first, _bytes(starts, x), mixes, of_x, of_first, sums,
        batch, tokens, tokens_each, tokens // chunks, chunks, width, blocks, *x.stride()[:2], *of_x.stride()[:2],
        MIXES=len(mixes), STARTS=starts is not None, CHANNELS=_CHANNELS, num_warps=1,
    )  # fmt: skip
    return of_x, of_first, sums.sum(0).to(mixes.dtype)


def _bytes(starts: Tensor | None, x: Tensor) -> Tensor:
    """starts [b, s] bool as bytes; without any, a tensor that nothing reads."""
    return x if starts is None else starts.contiguous().view(torch.uint8)
