"""rwkv7_inputs.py as Triton kernels: every element is read once, computed in float32, and written once. The backward pass computes
everything again from the inputs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_megatron.ops.generalized_delta_rule import STRONGEST_GATE
from hybrid_megatron.ops.kernels.head_rows import grid, grid_with_sums, load, parameter, place, steps_of, store, store_sum, summed
from hybrid_megatron.ops.kernels.row_layout import dense_rows, empty_like, lies_sequence_first

_SMALLEST: tl.constexpr = tl.constexpr(1e-12)
"""A length below it counts as this, as in torch.nn.functional.normalize."""
_STRONGEST: tl.constexpr = tl.constexpr(STRONGEST_GATE)
_SUMS: tl.constexpr = tl.constexpr(4)  # for decay_bias, rate_bias, k_k, k_a


@triton.jit
def _rwkv7_inputs(
    k, decay, rate, decay_bias, rate_bias, k_k, k_a, new_k, g, a, b, tokens, heads, width,
    k_steps, decay_steps, rate_steps, out_steps,
    STEP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program ROWS tokens of one head."""
    block, head, batch = place(heads)
    token, column = (block * ROWS + tl.arange(0, ROWS))[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (token < tokens) & (column < width)
    keys = load(k, k_steps, batch, token, head, column, inside, STEP)
    opening = load(decay, decay_steps, batch, token, head, column, inside, STEP) + parameter(decay_bias, head, column, width)
    rates = tl.sigmoid(load(rate, rate_steps, batch, token, head, column, inside, STEP) + parameter(rate_bias, head, column, width))
    long = keys * parameter(k_k, head, column, width)
    removed = long / tl.maximum(tl.sqrt(tl.sum(long * long, axis=1)), _SMALLEST)[:, None]
    keys = keys * (1 + (rates - 1) * parameter(k_a, head, column, width))
    store(new_k, keys, out_steps, batch, token, head, column, inside, STEP)
    store(g, tl.sigmoid(opening) * _STRONGEST, out_steps, batch, token, head, column, inside, STEP)
    store(a, -removed, out_steps, batch, token, head, column, inside, STEP)
    store(b, removed * rates, out_steps, batch, token, head, column, inside, STEP)


@triton.jit
def _rwkv7_inputs_gradients(
    grad_k, grad_g, grad_a, grad_b, k, decay, rate, decay_bias, rate_bias, k_k, k_a, of_k, of_decay, of_rate, sums,
    tokens, tokens_each, heads, width,
    grad_k_steps, grad_g_steps, grad_a_steps, grad_b_steps, k_steps, decay_steps, rate_steps, of_k_steps, of_decay_steps, of_rate_steps,
    STEP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program `tokens_each` (a multiple of ROWS) tokens of one head, ROWS after ROWS."""
    block, head, batch = place(heads)
    column = tl.arange(0, WIDTH)[None, :]
    of_decay_bias = tl.zeros((ROWS, WIDTH), tl.float32)
    of_rate_bias, of_k_k, of_k_a = of_decay_bias, of_decay_bias, of_decay_bias
    to_opening, to_rate = parameter(decay_bias, head, column, width), parameter(rate_bias, head, column, width)
    by, amount = parameter(k_k, head, column, width), parameter(k_a, head, column, width)
    begin = block * tokens_each
    for first in range(begin, tl.minimum(begin + tokens_each, tokens), ROWS):
        token = (first + tl.arange(0, ROWS))[:, None]
        inside = (token < tokens) & (column < width)
        of_new_k = load(grad_k, grad_k_steps, batch, token, head, column, inside, STEP)
        of_g = load(grad_g, grad_g_steps, batch, token, head, column, inside, STEP)
        of_a = load(grad_a, grad_a_steps, batch, token, head, column, inside, STEP)
        of_b = load(grad_b, grad_b_steps, batch, token, head, column, inside, STEP)
        keys = load(k, k_steps, batch, token, head, column, inside, STEP)
        open = tl.sigmoid(load(decay, decay_steps, batch, token, head, column, inside, STEP) + to_opening)
        rates = tl.sigmoid(load(rate, rate_steps, batch, token, head, column, inside, STEP) + to_rate)

        of_opening = of_g * _STRONGEST * open * (1 - open)
        store(of_decay, of_opening, of_decay_steps, batch, token, head, column, inside, STEP)
        of_decay_bias += of_opening

        long = keys * by
        length = tl.sqrt(tl.sum(long * long, axis=1))[:, None]
        removed = long / tl.maximum(length, _SMALLEST)
        of_rates = (of_new_k * keys * amount + of_b * removed) * rates * (1 - rates)
        store(of_rate, of_rates, of_rate_steps, batch, token, head, column, inside, STEP)
        of_rate_bias += of_rates

        of_removed = of_b * rates - of_a
        along = tl.sum(of_removed * removed, axis=1)[:, None]
        of_long = (of_removed - tl.where(length > _SMALLEST, removed * along, 0.0)) / tl.maximum(length, _SMALLEST)
        of_keys = of_long * by + of_new_k * (1 + (rates - 1) * amount)
        store(of_k, of_keys, of_k_steps, batch, token, head, column, inside, STEP)
        of_k_k += of_long * keys
        of_k_a += of_new_k * keys * (rates - 1)
    store_sum(sums, of_decay_bias, 0, _SUMS, width, WIDTH)
    store_sum(sums, of_rate_bias, 1, _SUMS, width, WIDTH)
    store_sum(sums, of_k_k, 2, _SUMS, width, WIDTH)
    store_sum(sums, of_k_a, 3, _SUMS, width, WIDTH)


def forward(k: Tensor, decay: Tensor, rate: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(k, g, a, b), contiguous."""
    tensors, parameters = [dense_rows(x) for x in (k, decay, rate)], [x.contiguous() for x in parameters]
    _, tokens, heads, width = k.shape
    new_k, a, b = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(3))
    g = torch.empty(k.shape, dtype=torch.float32, device=k.device)
    step, steps = steps_of(*tensors, new_k)
    programs, constants = grid(k)
    _rwkv7_inputs[programs](*tensors, *parameters, new_k, g, a, b, tokens, heads, width, *steps, STEP=step, **constants)
    return new_k, g, a, b


def gradients(grads: tuple[Tensor, ...], k: Tensor, decay: Tensor, rate: Tensor, *parameters: Tensor) -> list[Tensor]:
    """Of k, decay and rate, each as it lies, and of the parameters, from those of (k, g, a, b)."""
    tensors, made = [dense_rows(x) for x in (*grads, k, decay, rate)], [x.contiguous() for x in parameters]
    _, tokens, heads, width = k.shape
    of_tensors = [empty_like(x, sequence_first=lies_sequence_first(x)) for x in (k, decay, rate)]
    step, steps = steps_of(*tensors, *of_tensors)
    programs, constants, tokens_each, sums = grid_with_sums(k, _SUMS.value)
    _rwkv7_inputs_gradients[programs](*tensors, *made, *of_tensors, sums, tokens, tokens_each, heads, width, *steps, STEP=step, **constants)
    return of_tensors + [total.to(x.dtype) for total, x in zip(summed(sums), parameters)]


class RecurrenceInputs(torch.autograd.Function):
    """k, decay, rate [b, s, n, d], and decay_bias, rate_bias, k_k, k_a [n * d] -> k, g, a, b [b, s, n, d]. Keeps its inputs alone."""

    @staticmethod
    def forward(ctx, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.save_for_backward(*inputs)
        return forward(*inputs)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradients(grads, *ctx.saved_tensors))
