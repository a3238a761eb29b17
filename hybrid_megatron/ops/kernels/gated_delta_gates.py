"""The gates of gated_delta_gates.py as Triton kernels: a program some tokens and all their heads, computed in float32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_megatron.ops.gradient_place import place_of_gradient

_TOKENS = 64  # of a program, all of one sample


@triton.jit
def _softplus(x):
    """max(x, 0) + log(1 + y), y = e^-|x|. 1 + y is rounded, to 1 + z, and log(1 + y) is log(1 + z) y / z to all digits (Kahan)."""
    y = tl.exp(-tl.abs(x))
    rounded = 1.0 + y
    z = rounded - 1.0
    return tl.maximum(x, 0.0) + tl.where(z == 0.0, y, tl.log(rounded) * (y / tl.where(z == 0.0, 1.0, z)))


@triton.jit
def _places(tokens, heads, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """(sample, tokens [TOKENS, 1], heads [1, HEADS], which of these places there are) of this program."""
    batch = tl.program_id(1).to(tl.int64)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    head = tl.arange(0, HEADS)[None, :]
    return batch, token, head, (token < tokens) & (head < heads)


@triton.jit
def _read(a, b, A_log, dt_bias, batch, token, head, heads, inside, a_batch, a_token, a_head, b_batch, b_token, b_head):
    """(decay rate of the heads, a + dt_bias, b), in float32."""
    rate = tl.exp(tl.load(A_log + head, mask=head < heads, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + head, mask=head < heads, other=0.0).to(tl.float32)
    step = tl.load(a + batch * a_batch + token * a_token + head * a_head, mask=inside, other=0.0).to(tl.float32) + bias
    opening = tl.load(b + batch * b_batch + token * b_token + head * b_head, mask=inside, other=0.0).to(tl.float32)
    return rate, step, opening


@triton.jit
def _gates(
    a, b, A_log, dt_bias, g, beta, tokens, heads, largest, a_batch, a_token, a_head, b_batch, b_token, b_head,
    TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    batch, token, head, inside = _places(tokens, heads, TOKENS, HEADS)
    rate, step, opening = _read(
        a, b, A_log, dt_bias, batch, token, head, heads, inside, a_batch, a_token, a_head, b_batch, b_token, b_head
    )  # fmt: skip
    target = (batch * tokens + token) * heads + head
    tl.store(g + target, -rate * _softplus(step), mask=inside)
    tl.store(beta + target, largest * tl.sigmoid(opening), mask=inside)


@triton.jit
def _gates_gradients(
    of_g, of_beta, a, b, A_log, dt_bias, of_a, of_b, sums, tokens, heads, largest,
    a_batch, a_token, a_head, b_batch, b_token, b_head, of_a_batch, of_a_token, of_a_head, of_b_batch, of_b_token, of_b_head,
    TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """`sums` [programs, 2, heads]: this program's part of the gradients of A_log and dt_bias."""
    batch, token, head, inside = _places(tokens, heads, TOKENS, HEADS)
    rate, step, opening = _read(
        a, b, A_log, dt_bias, batch, token, head, heads, inside, a_batch, a_token, a_head, b_batch, b_token, b_head
    )  # fmt: skip
    source = (batch * tokens + token) * heads + head
    upper = tl.load(of_g + source, mask=inside, other=0.0) * -rate
    of_step = upper * tl.sigmoid(step)
    share = tl.sigmoid(opening)
    of_opening = tl.load(of_beta + source, mask=inside, other=0.0) * largest * share * (1.0 - share)
    target = of_a + batch * of_a_batch + token * of_a_token + head * of_a_head
    tl.store(target, of_step.to(of_a.dtype.element_ty), mask=inside)
    target = of_b + batch * of_b_batch + token * of_b_token + head * of_b_head
    tl.store(target, of_opening.to(of_b.dtype.element_ty), mask=inside)
    mine = sums + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * 2 * heads + tl.arange(0, HEADS)
    known = tl.arange(0, HEADS) < heads
    tl.store(mine, tl.sum(upper * _softplus(step), axis=0), mask=known)
    tl.store(mine + heads, tl.sum(of_step, axis=0), mask=known)


class Gates(torch.autograd.Function):
    """a, b [b, s, n], A_log, dt_bias [n] -> g, beta [b, s, n] float32. Keeps its inputs alone."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, largest_beta: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a, b, A_log, dt_bias)
        ctx.largest, ctx.places = float(largest_beta), (place_of_gradient(a), place_of_gradient(b))
        g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
        grid, sizes, constants = _shape(a)
        _gates[grid](a, b, A_log, dt_bias, g, beta, *sizes, ctx.largest, *a.stride(), *b.stride(), **constants)
        return g, beta

    @staticmethod
    def backward(ctx, of_g: Tensor, of_beta: Tensor) -> tuple[Tensor | None, ...]:
        a, b, A_log, dt_bias = ctx.saved_tensors
        of_a, of_b = (torch.empty_like(x) if place is None else place() for x, place in zip((a, b), ctx.places))
        grid, sizes, constants = _shape(a)
        sums = torch.empty(grid[0] * grid[1], 2, a.shape[2], dtype=torch.float32, device=a.device)
        strides = [stride for x in (a, b, of_a, of_b) for stride in x.stride()]
        _gates_gradients[grid](
            of_g.contiguous(), of_beta.contiguous(), a, b, A_log, dt_bias, of_a, of_b, sums, *sizes, ctx.largest, *strides, **constants
        )
        of_A_log, of_dt_bias = sums.sum(0)
        return of_a, of_b, of_A_log.to(A_log.dtype), of_dt_bias.to(dt_bias.dtype), None


def _shape(a: Tensor) -> tuple[tuple[int, int], tuple[int, int], dict[str, int]]:
    """(grid, tokens and heads, constants) of a kernel."""
    batch, tokens, heads = a.shape
    return (triton.cdiv(tokens, _TOKENS), batch), (tokens, heads), dict(TOKENS=_TOKENS, HEADS=triton.next_power_of_2(heads), num_warps=4)
