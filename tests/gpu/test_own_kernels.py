"""The project's own Triton kernels on a GPU, against the same in float64 from the same rounded inputs; relative errors of norms.

One rounding to bf16 is 2^-9 at most, 1.7e-3 in the mean; two stand in RMSNorm's forward pass, which is torch's.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.model.attention.rope import rotate
from hybrid_megatron.ops import token_shift
from hybrid_megatron.ops.gated_delta_gates import log_gate_and_beta
from hybrid_megatron.ops.gated_norm import GATES, gated_norm
from hybrid_megatron.ops.kernels import cross_entropy as cross_entropy_kernels
from hybrid_megatron.ops.matmul import add_matmul_, matmul
from hybrid_megatron.ops.rms_norm import rms_norm, rms_norm_and_input
from hybrid_megatron.ops.row_copy import batch_first, copy_rows
from hybrid_megatron.ops.rwkv7_inputs import recurrence_inputs
from hybrid_megatron.ops.rwkv7_output import finished
from hybrid_megatron.ops.silu import silu, unit_silu
from hybrid_megatron.ops.swiglu import swiglu
from hybrid_megatron.parallel import SequenceLayout
from tests import adamw_case
from tests.definitions import relative_error

BOUNDS = {torch.bfloat16: 4e-3, torch.float32: 2e-6}


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def check(function, definition, *inputs: Tensor) -> None:
    """Outputs and gradients of `function` against `definition` in float64."""
    found = [x.detach().requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    outputs, expected = several(function(*found)), several(definition(*exact))
    weights = [draw(*out.shape, dtype=torch.float64, seed=1 + i).to(out.dtype) for i, out in enumerate(outputs)]
    torch.autograd.backward(outputs, weights)
    torch.autograd.backward(expected, [weight.double() for weight in weights])
    assert outputs[0].dtype == inputs[0].dtype
    for out, theirs in zip(outputs, expected):
        assert relative_error(out, theirs) <= BOUNDS[out.dtype]
    for x, y in zip(found, exact):
        assert relative_error(x.grad, y.grad) <= BOUNDS[x.dtype]


def several(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", [(5, 3, 96), (64, 8, 2 * 4864)])
def test_swiglu(shape, dtype):
    check(swiglu, lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], 3 * draw(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", [(7, 1, 24), (4096, 8, 1536), (100, 1, 5000)])
def test_rms_norm(shape, dtype):
    x, weight = draw(*shape, dtype=dtype), (1 + draw(shape[-1], dtype=torch.float32, seed=2) / 4).to(dtype)
    check(lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), x, weight)


def cut_from_projection(heads: int, width: int, dtype: torch.dtype, seed: int = 0, tokens: int = 300) -> Tensor:
    """[2, tokens, heads, width] between other rows of [tokens, 2, rows]: sequence first in memory."""
    projected = draw(tokens, 2, 8 + heads * width + 16, dtype=dtype, seed=seed)
    return projected.transpose(0, 1)[..., 8 : 8 + heads * width].unflatten(-1, (heads, width))


def lies_sequence_first(x: Tensor) -> bool:
    """[b, s, n, d] as [s, b, n, d] without gaps."""
    return x.transpose(0, 1).is_contiguous()


def layouts(function, *inputs: Tensor) -> list[Tensor]:
    """Outputs and gradients, before autograd gives them the order of a leaf."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = several(function(*leaves))
    ones = [torch.ones_like(out).transpose(0, 1).contiguous().transpose(0, 1) for out in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, ones)]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("heads, width", [(3, 8), (12, 128), (17, 64)])
@pytest.mark.parametrize("function", [silu, unit_silu])
def test_silu(function, heads, width, dtype):
    """A slice between other rows; cut from a projection, its gradient lies as the projection does."""
    definition = F.silu if function is silu else lambda x: F.normalize(F.silu(x), dim=-1)
    rows, cut = draw(2, 300, heads, 3 * width, dtype=dtype), cut_from_projection(heads, width, dtype)
    check(function, definition, rows[..., width : 2 * width])
    check(function, definition, cut)
    out, gradient = layouts(function, cut)
    assert out.is_contiguous() and lies_sequence_first(gradient)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("heads, width, tokens", [(3, 8, 300), (12, 128, 2000), (17, 64, 300), (9, 96, 1), (5, 6, 77)])
def test_gated_norm(heads, width, tokens, dtype, gate):
    """o batch first as FLA's kernels give it, z cut from a projection: the output lies as the output projection takes it."""
    o, z = draw(2, tokens, heads, width, dtype=dtype), cut_from_projection(heads, width, dtype, seed=3, tokens=tokens)
    weight = (1 + draw(width, dtype=torch.float32, seed=2) / 4).to(dtype)
    check(lambda o, w, z: gated_norm(o, w, z, 1e-5, gate), lambda o, w, z: F.rms_norm(o, w.shape, w, 1e-5) * GATES[gate](z), o, weight, z)
    out, of_o, _, of_z = layouts(lambda o, w, z: gated_norm(o, w, z, 1e-5, gate), o, weight, z)
    assert lies_sequence_first(out) and of_o.is_contiguous() and lies_sequence_first(of_z)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("heads, width, tokens", [(3, 8, 300), (12, 128, 2000), (17, 64, 300), (9, 96, 1), (5, 6, 77)])
def test_inputs_of_rwkv7(heads, width, tokens, dtype):
    """k batch first, decay and rate cut from projections: the outputs lie batch first, each gradient as its input."""
    k = draw(2, tokens, heads, width, dtype=dtype)
    decay, rate = (cut_from_projection(heads, width, dtype, seed=seed, tokens=tokens).flatten(2) for seed in (3, 4))
    biases = [draw(heads * width, dtype=torch.float32, seed=seed) for seed in (5, 6)]
    inputs = (k, decay, rate, *biases, *(draw(heads * width, dtype=dtype, seed=seed) for seed in (7, 8)))
    check(recurrence_inputs, recurrence_inputs, *inputs)
    *outputs, of_k, of_decay, of_rate, _, _, _, _ = layouts(recurrence_inputs, *inputs)
    assert all(x.is_contiguous() for x in (*outputs, of_k)) and outputs[1].dtype is torch.float32
    assert lies_sequence_first(of_decay) and lies_sequence_first(of_rate)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("heads, width, tokens", [(3, 8, 300), (12, 128, 2000), (17, 64, 300), (9, 96, 1), (5, 6, 77)])
def test_output_of_rwkv7(heads, width, tokens, dtype):
    """o, r and k batch first, v and gate cut from projections: the output lies as the output projection takes it."""
    o, r, k = (draw(2, tokens, heads, width, dtype=dtype, seed=seed) for seed in (3, 4, 5))
    v, gate = (cut_from_projection(heads, width, dtype, seed=seed, tokens=tokens) for seed in (6, 7))
    inputs = (o, r, k, v, gate.flatten(2), *(draw(heads * width, dtype=dtype, seed=seed) for seed in (8, 9, 10)))
    function = partial(finished, eps=64e-5)
    check(function, function, *inputs)
    out, of_o, of_r, of_k, of_v, of_gate, _, _, _ = layouts(function, *inputs)
    assert all(x.is_contiguous() for x in (of_o, of_r, of_k)) and all(lies_sequence_first(x) for x in (out, of_v, of_gate))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("mixes, tokens, width, chunks", [(6, 2000, 1536, 1), (6, 300, 1536, 2), (3, 78, 130, 2), (1, 1, 24, 1)])
def test_token_shift(mixes, tokens, width, chunks, documents, dtype):
    """x sequence first and batch first."""
    rows, first = draw(tokens, 2, width, dtype=dtype), draw(2, chunks, width, dtype=dtype, seed=1)
    mix = draw(mixes, width, dtype=torch.float32, seed=2).sigmoid().to(dtype)
    starts = draw(2, tokens, dtype=torch.float32, seed=3) < -1 if documents else None
    grads = draw(mixes, 2, tokens, width, dtype=dtype, seed=4)
    for x in (rows.transpose(0, 1), rows.transpose(0, 1).contiguous()):
        exact = [tensor.double().requires_grad_() for tensor in (x, first, mix)]
        expected = token_shift._mixed(exact[0], exact[1], starts, exact[2])
        of = torch.autograd.grad(expected, exact, grads.double())
        out, found = token_shift._mixed(x, first, starts, mix), token_shift._mixed_backward(grads, x, first, starts, mix)
        assert out.is_contiguous() and lies_sequence_first(found[0]) == lies_sequence_first(x)
        assert all(tensor.dtype is dtype for tensor in (out, *found))
        for mine, theirs in zip((out, *found), (expected, *of)):
            assert relative_error(mine, theirs) <= BOUNDS[dtype]


def test_projections_of_shifted_tokens():
    """As a layer's input lies; with matrices of several heights."""
    x, mixes = draw(300, 2, 96, dtype=torch.bfloat16).transpose(0, 1), draw(3, 96, dtype=torch.bfloat16, seed=1)
    weights = [draw(out, 96, dtype=torch.bfloat16, seed=out) / 8 for out in (96, 32, 7)]
    starts = draw(2, 300, dtype=torch.float32, seed=2) < -1

    def projections(x: Tensor, mixes: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return token_shift.shifted_projections(x, mixes, weights, SequenceLayout(300, document_starts=starts), None)

    check(projections, projections, x, mixes, *weights)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_rotation(dtype):
    """Batch first, and cut from a projection: then it stays sequence first unless asked for otherwise, and its gradient does."""
    layout = SequenceLayout(300)
    for x in (draw(2, 300, 12, 128, dtype=dtype), cut_from_projection(12, 128, dtype)):
        for first in (False, True):
            turned = partial(rotate, layout=layout, base=1e4, batch_first=first)
            check(turned, turned, x)
            out, gradient = layouts(turned, x)
            assert out.is_contiguous() if first or x.is_contiguous() else lies_sequence_first(out)
            assert gradient.is_contiguous() if x.is_contiguous() else lies_sequence_first(gradient)


@pytest.mark.parametrize("heads, width", [(3, 8), (12, 128), (17, 1)])
def test_copied_rows(heads, width):
    """Head by head into a place between other rows, which stay as they are."""
    source = draw(2, heads, 300, width, dtype=torch.bfloat16).transpose(1, 2)
    whole = torch.full((300, 2, 7 + heads * width + 3), 9.0, device="cuda", dtype=torch.bfloat16)
    target = whole.transpose(0, 1)[..., 7:-3].unflatten(-1, (heads, width))
    copy_rows(source, target)
    assert torch.equal(target, source) and (whole[..., :7] == 9).all() and (whole[..., -3:] == 9).all()


@pytest.mark.parametrize("largest_beta", [1, 2])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_gates_of_the_gated_delta_rule(dtype, largest_beta):
    """Columns of the projection; every log gate by itself, since what softplus makes of far negative numbers is next to nothing."""
    rows = draw(300, 2, 6168, dtype=dtype)
    rows[::3] *= 8
    a, b = (rows.transpose(0, 1)[..., first : first + 12] for first in (6144, 6156))
    A_log, dt_bias = (draw(12, dtype=torch.float32, seed=seed) for seed in (1, 2))

    def both(*inputs: Tensor) -> Tensor:
        return torch.stack(log_gate_and_beta(*inputs, largest_beta))

    leaves = [x.detach().requires_grad_() for x in (a, b, A_log, dt_bias)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    found, expected = both(*leaves), both(*exact)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected.float(), rtol=5e-6, atol=0)
    weights = draw(*found.shape, dtype=torch.float32, seed=3)
    gradients, exact_gradients = torch.autograd.grad(found, leaves, weights), torch.autograd.grad(expected, exact, weights.double())
    for mine, theirs in zip(gradients, exact_gradients):
        assert mine.dtype in (dtype, torch.float32) and relative_error(mine, theirs) <= BOUNDS[mine.dtype]


def test_rows_for_flas_kernels():
    """A slice of the projection, sequence first in memory and 6,168 rows wide; its gradient."""
    rows = draw(300, 2, 6168, dtype=torch.bfloat16).requires_grad_()
    x = rows.transpose(0, 1)[..., 16 : 16 + 4 * 128].unflatten(-1, (4, 128))
    out, grad = batch_first(x), draw(2, 300, 4, 128, dtype=torch.bfloat16, seed=1)
    assert out.is_contiguous() and torch.equal(out, x)
    out.backward(grad)
    found = rows.grad.transpose(0, 1)[..., 16 : 16 + 4 * 128].unflatten(-1, (4, 128))
    assert torch.equal(found, grad) and not rows.grad[..., :16].any() and batch_first(out) is out


def test_norm_with_the_gradient_of_its_input():
    """Of a residual branch: what comes back for the input is added to the norm's own."""
    x, weight, more = (
        draw(2, 300, 1536, dtype=torch.bfloat16),
        draw(1536, dtype=torch.bfloat16, seed=1),
        draw(2, 300, 1536, dtype=torch.bfloat16, seed=2),
    )

    def form(norm):
        def both(x, w):
            out, same = norm(x, w)
            return out + same * more.to(x.dtype)

        return both

    check(form(lambda x, w: rms_norm_and_input(x, w, 1e-5)), form(lambda x, w: (F.rms_norm(x, w.shape, w, 1e-5), x)), x, weight)


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 2**-8), (torch.float32, 1e-4)])
@pytest.mark.parametrize("rows, words", [(7, 9), (64, 4097), (3072, 128_256)])
def test_gradient_of_logits_in_their_place(rows, words, dtype, bound):
    """Every element by itself: a block stored over logits that were still to be read would be far off in a few. Seen five times."""
    logits = draw(rows, words, dtype=torch.float32)
    targets = torch.randint(-words, words, (rows,), device="cuda")  # others' words among them
    weights = draw(rows, dtype=torch.float32, seed=1).abs()
    highest, total, chosen = cross_entropy_kernels.row_sums(logits, targets)
    mine, word = targets >= 0, targets.clamp(min=0)
    assert torch.equal(chosen, logits.gather(1, word[:, None])[:, 0] * mine)
    expected = (logits - highest[:, None]).exp() / total[:, None]
    expected[torch.arange(rows, device="cuda"), word] -= mine.float()
    expected *= weights[:, None]
    for _ in range(5):
        overwritten = logits.clone()
        found = cross_entropy_kernels.gradient(overwritten, targets, highest, total, weights, dtype)
        assert found.dtype is dtype and found.data_ptr() == overwritten.data_ptr()
        torch.testing.assert_close(found.float(), expected, rtol=bound, atol=0)


def test_products_of_rows_with_gaps():
    """As the gradient of logits lies: no product copies it, 164 MB, or takes other than a workspace. Tensor cores add 4,096 products one
    after the other in float32 and cut the last bits off: 4e-6 was seen."""
    rows = draw(4096, 40_000, dtype=torch.bfloat16)[:, :20_000]
    right, inputs = draw(20_000, 64, dtype=torch.bfloat16, seed=1), draw(4096, 64, dtype=torch.bfloat16, seed=2)
    out, total = torch.empty_like(inputs), draw(20_000, 64, dtype=torch.float32)
    exact = rows.double().t() @ inputs.double()
    expected = total.double() + exact
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.mm(rows, right, out=out)
    first = matmul(rows.t(), inputs, torch.float32)
    add_matmul_(total, rows.t(), inputs)
    assert torch.cuda.max_memory_allocated() - before < rows.numel()
    assert relative_error(out, rows.double() @ right.double()) <= BOUNDS[torch.bfloat16]
    assert relative_error(first, exact) <= 1e-5 and relative_error(total, expected) <= 1e-5


def test_sum_of_weight_gradients():
    """Accumulated in float32 beside what is there."""
    grad, inputs, total = (
        draw(4096, 96, dtype=torch.bfloat16),
        draw(4096, 64, dtype=torch.bfloat16, seed=1),
        draw(96, 64, dtype=torch.float32),
    )
    expected = total.double() + grad.double().t() @ inputs.double()
    add_matmul_(total, grad.t(), inputs)
    assert relative_error(total, expected) <= 2e-6


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("sizes, offset", [([64, 2048, 4097, 1, 30], 0), ([64, 2048, 4097, 1, 30], 1), ([4096, 1 << 22, 1536], 0)])
def test_adamw(sizes, offset, copied):
    """Copies are the values' roundings; where an address is no multiple of 16 bytes too."""
    found = adamw_case.errors("cuda", sizes, offset, copied)
    assert found.pop("copies", 0.0) == 0
    assert max(found.values()) <= 1e-6, found
