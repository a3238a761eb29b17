"""rwkv7_output.py as Triton kernels: every element is read once, computed in float32, and written once. The backward pass computes norm
and bonus again from the inputs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_megatron.ops.kernels.head_rows import grid, grid_with_sums, load, parameter, place, steps_of, store, store_sum, summed
from hybrid_megatron.ops.kernels.row_layout import dense_rows, empty_like, lies_sequence_first

_SUMS: tl.constexpr = tl.constexpr(3)  # for weight, bias, r_k


@triton.jit
def _normal(values, column, width, eps):
    """(rows of mean 0 and variance 1, 1 / standard deviation); where `values` is padding the rows are not zero."""
    centred = values - (tl.sum(values, axis=1) / width)[:, None]
    real = tl.where(column < width, centred, 0.0)
    inverse = tl.rsqrt(tl.sum(real * real, axis=1) / width + eps)[:, None]
    return centred * inverse, inverse


@triton.jit
def _parts(
    o, r, k, v, gate, o_steps, r_steps, k_steps, v_steps, gate_steps, u, batch, token, head, column, inside, width, eps,
    STEP: tl.constexpr,
):  # fmt: skip
    """(norm of o, 1 / standard deviation, r, k, bonus of a token for its own value, v, gate)."""
    normal, inverse = _normal(load(o, o_steps, batch, token, head, column, inside, STEP), column, width, eps)
    reads = load(r, r_steps, batch, token, head, column, inside, STEP)
    keys = load(k, k_steps, batch, token, head, column, inside, STEP)
    bonus = tl.sum(reads * keys * u, axis=1)[:, None]
    own = load(v, v_steps, batch, token, head, column, inside, STEP)
    return normal, inverse, reads, keys, bonus, own, load(gate, gate_steps, batch, token, head, column, inside, STEP)


@triton.jit
def _rwkv7_output(
    o, r, k, v, gate, weight, bias, r_k, out, tokens, heads, width, eps,
    o_steps, r_steps, k_steps, v_steps, gate_steps, out_steps,
    STEP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program ROWS tokens of one head."""
    block, head, batch = place(heads)
    token, column = (block * ROWS + tl.arange(0, ROWS))[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (token < tokens) & (column < width)
    u = parameter(r_k, head, column, width)
    normal, _, _, _, bonus, own, gates = _parts(
        o, r, k, v, gate, o_steps, r_steps, k_steps, v_steps, gate_steps, u, batch, token, head, column, inside, width, eps, STEP
    )  # fmt: skip
    normal = normal * parameter(weight, head, column, width) + parameter(bias, head, column, width)
    store(out, (normal + bonus * own) * gates, out_steps, batch, token, head, column, inside, STEP)


@triton.jit
def _rwkv7_output_gradients(
    grad, o, r, k, v, gate, weight, bias, r_k, of_o, of_r, of_k, of_v, of_gate, sums, tokens, tokens_each, heads, width, eps,
    grad_steps, o_steps, r_steps, k_steps, v_steps, gate_steps, of_o_steps, of_r_steps, of_k_steps, of_v_steps, of_gate_steps,
    STEP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program `tokens_each` (a multiple of ROWS) tokens of one head, ROWS after ROWS."""
    block, head, batch = place(heads)
    column = tl.arange(0, WIDTH)[None, :]
    of_weight = tl.zeros((ROWS, WIDTH), tl.float32)
    of_bias, of_r_k = of_weight, of_weight
    w, shift, u = parameter(weight, head, column, width), parameter(bias, head, column, width), parameter(r_k, head, column, width)
    begin = block * tokens_each
    for first in range(begin, tl.minimum(begin + tokens_each, tokens), ROWS):
        token = (first + tl.arange(0, ROWS))[:, None]
        inside = (token < tokens) & (column < width)
        of_out = load(grad, grad_steps, batch, token, head, column, inside, STEP)
        normal, inverse, reads, keys, bonus, own, gates = _parts(
            o, r, k, v, gate, o_steps, r_steps, k_steps, v_steps, gate_steps, u, batch, token, head, column, inside, width, eps, STEP
        )  # fmt: skip
        of_gates = of_out * (normal * w + shift + bonus * own)
        store(of_gate, of_gates, of_gate_steps, batch, token, head, column, inside, STEP)

        of_sum = of_out * gates  # of norm and bonus; zero outside
        of_bonus = tl.sum(of_sum * own, axis=1)[:, None]
        store(of_v, of_sum * bonus, of_v_steps, batch, token, head, column, inside, STEP)
        store(of_r, of_bonus * keys * u, of_r_steps, batch, token, head, column, inside, STEP)
        store(of_k, of_bonus * reads * u, of_k_steps, batch, token, head, column, inside, STEP)
        of_r_k += of_bonus * reads * keys

        of_normal = of_sum * w
        mean, along = tl.sum(of_normal, axis=1)[:, None] / width, tl.sum(of_normal * normal, axis=1)[:, None] / width
        store(of_o, inverse * (of_normal - mean - normal * along), of_o_steps, batch, token, head, column, inside, STEP)
        of_weight += of_sum * normal
        of_bias += of_sum
    store_sum(sums, of_weight, 0, _SUMS, width, WIDTH)
    store_sum(sums, of_bias, 1, _SUMS, width, WIDTH)
    store_sum(sums, of_r_k, 2, _SUMS, width, WIDTH)


def forward(*inputs: Tensor, eps: float) -> Tensor:
    """o, r, k, v, gate [b, s, n, d], and weight, bias, r_k [n * d] -> [b, s, n, d], sequence first in memory."""
    tensors, parameters = [dense_rows(x) for x in inputs[:5]], [x.contiguous() for x in inputs[5:]]
    _, tokens, heads, width = inputs[0].shape
    out = empty_like(inputs[0], sequence_first=True)
    step, steps = steps_of(*tensors, out)
    programs, constants = grid(out)
    _rwkv7_output[programs](*tensors, *parameters, out, tokens, heads, width, eps, *steps, STEP=step, **constants)
    return out


def gradients(grad: Tensor, *inputs: Tensor, eps: float) -> list[Tensor]:
    """Of o, batch first, of r, k, v and gate, each as it lies, and of the parameters, from that of the output."""
    tensors, parameters = [dense_rows(x) for x in (grad, *inputs[:5])], [x.contiguous() for x in inputs[5:]]
    o, *others = inputs[:5]
    _, tokens, heads, width = o.shape
    of_tensors = [empty_like(o, sequence_first=False), *(empty_like(x, sequence_first=lies_sequence_first(x)) for x in others)]
    step, steps = steps_of(*tensors, *of_tensors)
    programs, constants, tokens_each, sums = grid_with_sums(o, _SUMS.value)
    _rwkv7_output_gradients[programs](
        *tensors, *parameters, *of_tensors, sums, tokens, tokens_each, heads, width, eps, *steps, STEP=step, **constants
    )
    return of_tensors + [total.to(x.dtype) for total, x in zip(summed(sums), inputs[5:])]


class Finished(torch.autograd.Function):
    """o, r, k, v, gate [b, s, n, d], weight, bias, r_k [n * d], eps -> [b, s, n, d]. Keeps its inputs alone."""

    @staticmethod
    def forward(ctx, *inputs) -> Tensor:
        *tensors, ctx.eps = inputs
        ctx.save_for_backward(*tensors)
        return forward(*tensors, eps=ctx.eps)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *gradients(grad, *ctx.saved_tensors, eps=ctx.eps), None
