"""python -m tests.cpu.interpreted_kernels, with TRITON_INTERPRET=1: our Triton kernels by Triton's interpreter, against float64.

Prints the largest relative errors as JSON.
"""

import contextlib
import json
from unittest.mock import patch

import torch
import torch.nn.functional as F

from hybrid_megatron.ops import rwkv7_inputs, rwkv7_output, token_shift
from hybrid_megatron.ops.gated_delta_gates import log_gate_and_beta
from hybrid_megatron.ops.gated_norm import GATES
from hybrid_megatron.ops.kernels import cross_entropy as cross_entropy_kernels
from hybrid_megatron.ops.kernels import embedding as embedding_kernels
from hybrid_megatron.ops.kernels import gated_delta_gates as gated_delta_gates_kernels
from hybrid_megatron.ops.kernels import gated_norm as gated_norm_kernels
from hybrid_megatron.ops.kernels import gla_scores as gla_scores_kernels
from hybrid_megatron.ops.kernels import head_rows
from hybrid_megatron.ops.kernels import rms_norm as rms_norm_kernels
from hybrid_megatron.ops.kernels import rotary as rotary_kernel
from hybrid_megatron.ops.kernels import row_copy as row_copy_kernel
from hybrid_megatron.ops.kernels import rwkv7_inputs as rwkv7_inputs_kernels
from hybrid_megatron.ops.kernels import rwkv7_output as rwkv7_output_kernels
from hybrid_megatron.ops.kernels import silu as silu_kernels
from hybrid_megatron.ops.kernels import swiglu as swiglu_kernels
from hybrid_megatron.ops.kernels import token_shift as token_shift_kernels
from hybrid_megatron.training import adamw
from hybrid_megatron.training.adamw import FusedAdamW
from tests import adamw_case
from tests.definitions import relative_error


def cross_entropy(words: int, dtype: torch.dtype) -> dict[str, float]:
    """Targets of these words and of other ranks'; logits far apart; a weight of 0. The gradient lies over the logits."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(5, words, generator=random) * 4 + torch.tensor([0.0, 80, -80, 0, 0])[:, None]
    targets, weights = torch.tensor([0, words - 1, -3, words, 2]), torch.tensor([1.0, 2, 3, 0.5, 0])
    exact = logits.double()
    highest, total, chosen = cross_entropy_kernels.row_sums(logits, targets)
    mine = (targets >= 0) & (targets < words)
    overwritten = logits.clone()
    gradient = cross_entropy_kernels.gradient(overwritten, targets, highest, total, weights, dtype)
    one_hot = F.one_hot(targets.clamp(0, words - 1), words) * mine[:, None]
    assert torch.equal(highest, logits.amax(1)) and gradient.dtype is dtype
    assert [row.data_ptr() for row in gradient] == [row.data_ptr() for row in overwritten] and gradient.stride(1) == 1
    return {
        "logsumexp": relative_error(highest + total.log(), exact.logsumexp(1)),
        "chosen": relative_error(chosen, exact.gather(1, targets.clamp(0, words - 1)[:, None])[:, 0] * mine),
        "gradient": relative_error(gradient, (exact.softmax(1) - one_hot) * weights[:, None]),
    }


def sequence_first(x: torch.Tensor) -> bool:
    """Whether x [b, s, n, d] lies in memory as [s, b, n, d], without gaps."""
    return x.transpose(0, 1).is_contiguous()


def rotation(heads: int, width: int, tables: int, sliced: bool, batch_first: bool) -> dict[str, float]:
    """A slice of a projection's rows (sequence first) or between other rows (batch first), and a gradient that lies head by head."""
    random = torch.Generator().manual_seed(1)
    rows = torch.randn(2, 7, heads, 3 * width, generator=random)
    x = (rows.transpose(0, 1).contiguous().transpose(0, 1) if sliced else rows)[..., width : 2 * width].requires_grad_()
    angles = torch.rand(tables, 7, width // 2, generator=random) * 6
    out = rotary_kernel.Rotate.apply(x, angles.cos(), angles.sin(), batch_first)
    grad = torch.randn(2, heads, 7, width, generator=random).transpose(1, 2)
    (gradient,) = torch.autograd.grad(out, x, grad)
    assert sequence_first(out) if sliced and not batch_first else out.is_contiguous()
    assert sequence_first(gradient) if sliced else gradient.is_contiguous()

    exact = x.detach().double().requires_grad_()
    first, second = exact.chunk(2, -1)
    cos, sin = angles.double().cos()[:, :, None], angles.double().sin()[:, :, None]
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    expected.backward(grad.double())
    return {"output": relative_error(out, expected), "gradient": relative_error(gradient, exact.grad)}


def rms_norm(rows: int, width: int) -> dict[str, float]:
    """Several blocks of rows to a program, the last of them not full, for the weight's sums; some rows next to zero."""
    rms_norm_kernels._PROGRAMS, rms_norm_kernels._AT_ONCE = 3, 32
    random = torch.Generator().manual_seed(2)
    x = torch.randn(rows, width, generator=random) * torch.rand(rows, 1, generator=random) ** 4
    weight, grad = torch.rand(width, generator=random) + 0.5, torch.randn(rows, width, generator=random)
    exact, exact_weight = (t.double().requires_grad_() for t in (x, weight))
    F.rms_norm(exact, (width,), exact_weight, 1e-5).backward(grad.double())
    inverse = (x.double().square().mean(1, keepdim=True) + 1e-5).rsqrt().float()
    of_x, of_weight = rms_norm_kernels.gradients(grad, None, x, weight, inverse)
    more = torch.randn(rows, width, generator=random)
    with_more, _ = rms_norm_kernels.gradients(grad, more, x, weight, inverse)
    return {
        "input": relative_error(of_x, exact.grad),
        "input and more": relative_error(with_more, exact.grad + more),
        "weight": relative_error(of_weight, exact_weight.grad),
    }


def gla_scores(lengths: list[int], width: int, chunk: int, strongest: float) -> dict[str, float]:
    """One sample of `lengths[0]` tokens twice, or sequences of these lengths; every fifth channel's gates are `strongest` at times."""
    random = torch.Generator().manual_seed(12)
    batch, heads, length = (2 if len(lengths) == 1 else 1), 2, sum(lengths)
    q, k, g = (torch.randn(batch, length, heads, width, generator=random) for _ in range(3))
    g = F.logsigmoid(g)
    rare = (torch.rand(batch, length, heads, 1, generator=random) < 0.2) & (torch.arange(width) % 5 == 3)
    g = torch.where(rare, strongest, g).float()
    borders = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    places = [[i, j] for i, n in enumerate(lengths) for j in range(-(-n // chunk))]
    sequences = (borders, chunk, torch.tensor(places)) if len(lengths) > 1 else (None, chunk, None)
    exact_q, exact_k = (x.double().requires_grad_() for x in (q, k))
    sums, expected = torch.zeros_like(g), torch.zeros(batch, length, heads, chunk, dtype=torch.float64)
    for i, j in places:
        rows = slice(int(borders[i]) + j * chunk, min(int(borders[i]) + (j + 1) * chunk, int(borders[i + 1])))
        exact = g[:, rows].double().cumsum(1) / torch.tensor(2.0, dtype=torch.float64).log()
        sums[:, rows], tokens = exact.float(), exact.shape[1]
        exact = sums[:, rows].double()  # what the kernels get
        between = (exact[:, :, None] - exact[:, None]).clamp(max=0).exp2()  # [b, i, j, n, K]
        found = torch.einsum("bink,bjnk,bijnk->binj", exact_q[:, rows], exact_k[:, rows], between) * 0.3
        seen = torch.ones(tokens, tokens).tril()[None, :, None]
        expected[:, rows] = F.pad(found * seen, (0, chunk - tokens))
    grad = torch.randn(expected.shape, generator=random)
    expected.backward(grad.double())
    found = gla_scores_kernels.scores(q, k, sums, 0.3, *sequences)
    of_q, of_k = gla_scores_kernels.gradients(q, k, sums, grad * 0.3, *sequences)
    return {
        "scores": relative_error(found, expected.detach()),
        "queries": relative_error(of_q, exact_q.grad),
        "keys": relative_error(of_k, exact_k.grad),
    }


def fused_adamw(copied: bool) -> dict[str, float]:
    """FusedAdamW as on CUDA, beside itself as on a CPU: two groups, a step with a divisor, a parameter without a gradient."""
    random = torch.Generator().manual_seed(13)
    first = [torch.randn(n, generator=random) for n in (40, 700, 3)]
    found = []
    for kernel in (False, True):
        params = [torch.nn.Parameter(x.clone()) for x in first]
        groups = [{"params": params[:1], "weight_decay": 0.0}, {"params": params[1:], "lr": 3e-2}]
        optimizer = FusedAdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        if kernel and copied:
            optimizer.copies = {params[0]: None} | {p: torch.zeros(p.shape, dtype=torch.bfloat16) for p in params[1:]}
        gradients = torch.Generator().manual_seed(14)
        with patch.object(adamw, "_by_torch", optimizer._by_kernel) if kernel else contextlib.nullcontext():
            for divisor in (None, 4.0, None):
                for p in params[:2]:
                    p.grad = torch.randn(p.shape, generator=gradients)
                optimizer.divisor = divisor
                optimizer.step()
        found.append(torch.cat([x.detach() for p in params for x in (p, *optimizer.state[p].values())]))
    errors = {"parameters and moments": relative_error(found[1], found[0].double())}
    if copied:
        written = optimizer.copies[params[1]]
        assert not optimizer.copies[params[2]].any(), "without a gradient nothing is written"
        errors["copies"] = relative_error(written, params[1].detach().double())
    return errors


def swiglu(width: int) -> dict[str, float]:
    random = torch.Generator().manual_seed(3)
    x, grad = torch.randn(2, 3, 2 * width, generator=random) * 4, torch.randn(2, 3, width, generator=random)
    exact = x.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    expected = F.silu(gate) * up
    expected.backward(grad.double())
    return {
        "output": relative_error(swiglu_kernels.product(x), expected),
        "gradient": relative_error(swiglu_kernels.gradient(grad, x), exact.grad),
    }


def silu(heads: int, width: int, unit: bool) -> dict[str, float]:
    """A slice between other rows, with a row of zeros; the gradient lies head by head."""
    random = torch.Generator().manual_seed(4)
    rows = torch.randn(2, 5, heads, 3 * width, generator=random)
    rows[1, 2, 0] = 0
    x, grad = rows[..., width : 2 * width].requires_grad_(), torch.randn(2, heads, 5, width, generator=random).transpose(1, 2)
    out = silu_kernels.SiLU.apply(x, unit)
    (gradient,) = torch.autograd.grad(out, x, grad)
    assert out.is_contiguous() and gradient.is_contiguous()
    exact = x.detach().double().requires_grad_()
    expected = F.normalize(F.silu(exact), dim=-1) if unit else F.silu(exact)
    expected.backward(grad.double())
    zero = torch.zeros_like(gradient, dtype=torch.bool)
    zero[1, 2, 0] = True  # with the norm 1e12 times as large as the others
    return {
        "output": relative_error(out, expected),
        "gradient": relative_error(gradient.masked_fill(zero, 0), exact.grad.masked_fill(zero, 0)),
        "gradient of a row of zeros": relative_error(gradient[1, 2, 0], exact.grad[1, 2, 0]),
    }


def silu_of_a_projection(heads: int, unit: bool) -> dict[str, float]:
    """Rows of 16 that a projection put side by side, sequence first: the output lies batch first, the gradient as the projection."""
    random = torch.Generator().manual_seed(6)
    projected, grad = torch.randn(5, 3, 8 + heads * 16, generator=random), torch.randn(3, 5, heads, 16, generator=random)
    x = projected.transpose(0, 1)[..., 8:].unflatten(-1, (heads, 16)).requires_grad_()
    out = silu_kernels.SiLU.apply(x, unit)
    (gradient,) = torch.autograd.grad(out, x, grad)
    assert out.is_contiguous() and sequence_first(gradient)
    exact = x.detach().double().requires_grad_()
    expected = F.normalize(F.silu(exact), dim=-1) if unit else F.silu(exact)
    expected.backward(grad.double())
    return {"output": relative_error(out, expected), "gradient": relative_error(gradient, exact.grad)}


def gated_norm(heads: int, width: int, gate: str, off: int, tokens: int = 5, programs: int = 1024) -> dict[str, float]:
    """o batch first with rows next to zero, z a slice of a projection's rows that begins `off` elements in, the gradient either as the
    output projection gives it, sequence first among other columns, or head by head."""
    random, batch, eps = torch.Generator().manual_seed(7), 3, 1e-5
    o = torch.randn(batch, tokens, heads, width, generator=random) * torch.rand(batch, tokens, heads, 1, generator=random) ** 4
    projected = torch.randn(tokens, batch, off + heads * width + 3 * off, generator=random) * 2
    z = projected.transpose(0, 1)[..., off : off + heads * width].unflatten(-1, (heads, width))
    weight = torch.rand(width, generator=random) + 0.5
    columns = torch.randn(tokens, batch, off + heads * width, generator=random)
    grad = columns.transpose(0, 1)[..., off:].unflatten(-1, (heads, width))
    found, exact = ([x.detach().to(dtype).requires_grad_() for x in (o, weight, z)] for dtype in (torch.float32, torch.float64))
    gated_norm_kernels._PROGRAMS = programs
    out = gated_norm_kernels.GatedNorm.apply(*found, eps, gate)
    gradients = torch.autograd.grad(out, found, grad, retain_graph=True)
    assert sequence_first(out) and gradients[0].is_contiguous() and sequence_first(gradients[2])

    expected = F.rms_norm(exact[0], (width,), exact[1], eps) * GATES[gate](exact[2])
    expected_gradients = torch.autograd.grad(expected, exact, grad.double())
    by_head = torch.autograd.grad(out, found, grad.transpose(1, 2).contiguous().transpose(1, 2))
    assert all(torch.equal(one, other) for one, other in zip(gradients, by_head))
    errors = {name: relative_error(one, other) for name, one, other in zip(("o", "weight", "z"), gradients, expected_gradients)}
    return {"output": relative_error(out, expected)} | errors


def gated_delta_gates(heads: int, tokens: int, largest: int) -> dict[str, float]:
    """Single columns of a projection, some far from zero on either side, where softplus is next to nothing or next to linear."""
    random = torch.Generator().manual_seed(8)
    projected = torch.randn(tokens, 2, 3 + 2 * heads, generator=random) * torch.tensor([1.0, 12.0]).repeat(tokens)[:tokens, None, None]
    projected.requires_grad_()
    a, b = (projected.transpose(0, 1)[..., first : first + heads] for first in (3, 3 + heads))
    A_log, dt_bias = (torch.randn(heads, generator=random).requires_grad_() for _ in range(2))
    of_g, of_beta = (torch.randn(2, tokens, heads, generator=random) for _ in range(2))
    found = gated_delta_gates_kernels.Gates.apply(a, b, A_log, dt_bias, largest)
    gradients = torch.autograd.grad(found, (projected, A_log, dt_bias), (of_g, of_beta))
    exact = [x.detach().double().requires_grad_() for x in (projected, A_log, dt_bias)]
    a, b = (exact[0].transpose(0, 1)[..., first : first + heads] for first in (3, 3 + heads))
    expected = log_gate_and_beta(a, b, exact[1], exact[2], largest)
    expected_gradients = torch.autograd.grad(expected, exact, (of_g.double(), of_beta.double()))
    names = ("g", "beta", "gradient of a and b", "gradient of A_log", "gradient of dt_bias")
    errors = {name: relative_error(*pair) for name, *pair in zip(names, (*found, *gradients), (*expected, *expected_gradients))}
    return errors | {"largest of g": float((found[0] / expected[0] - 1).abs().max())}


def copied_rows(heads: int, width: int) -> dict[str, float]:
    """From head by head into a place between other rows, which stay as they are."""
    source = torch.randn(2, heads, 5, width, generator=torch.Generator().manual_seed(5)).transpose(1, 2)
    whole = torch.full((5, 2, 7 + heads * width + 3), 9.0)
    target = whole.transpose(0, 1)[..., 7:-3].unflatten(-1, (heads, width))
    row_copy_kernel.copy(source, target)
    assert (whole[..., :7] == 9).all() and (whole[..., -3:] == 9).all()
    return {"copy": relative_error(target, source)}


def heads_of_rows(tokens: int, heads: int, width: int, off: int, seed: int) -> torch.Tensor:
    """[3, tokens, heads, width], `off` elements into the rows of a projection that lie sequence first."""
    rows = torch.randn(tokens, 3, 2 * off + heads * width, generator=torch.Generator().manual_seed(seed))
    return rows.transpose(0, 1)[..., off : off + heads * width].unflatten(-1, (heads, width))


def head_by_head(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def against_float64(function, definition, inputs: dict[str, torch.Tensor], grads: tuple[torch.Tensor, ...]):
    """(outputs and gradients by each input, those of the definition in float64)."""
    answers = []
    for form, dtype in ((function, torch.float32), (definition, torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs.values()]
        outputs = form(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        gradients = torch.autograd.grad(outputs, leaves, [grad.to(dtype) for grad in grads])
        answers.append((outputs, dict(zip(inputs, gradients))))
    return answers


def inputs_of_rwkv7(heads: int, width: int, off: int, tokens: int = 5, programs: int = 2048) -> dict[str, float]:
    """k and rate cut from projections, decay batch first; k k_k zero in one row, and too short for a length of its own in another."""
    head_rows._PROGRAMS = programs
    k, rate = (heads_of_rows(tokens, heads, width, off, seed) for seed in (8, 9))
    decay = heads_of_rows(tokens, heads, width, off, 10).contiguous() * 2
    k[1, 2, 0], k[2, 3, -1] = 0, k[2, 3, -1] * 1e-14
    random = torch.Generator().manual_seed(11)
    inputs = {"k": k, "decay": decay, "rate": rate}
    inputs |= {name: torch.randn(heads * width, generator=random) for name in ("decay_bias", "rate_bias", "k_k", "k_a")}
    grads = tuple(heads_of_rows(tokens, heads, width, off, seed) for seed in (12, 13, 14, 15))
    function, definition = rwkv7_inputs_kernels.RecurrenceInputs.apply, rwkv7_inputs.by_definition
    (outputs, found), (expected, exact) = against_float64(function, definition, inputs, (*grads[:3], head_by_head(grads[3])))
    assert all(x.is_contiguous() for x in (*outputs, found["decay"])) and sequence_first(found["k"]) and sequence_first(found["rate"])
    short = torch.zeros_like(k, dtype=torch.bool)
    short[1, 2, 0] = short[2, 3, -1] = True  # their gradients are 1e12 times as large as the others
    errors = {name: relative_error(mine, theirs) for name, mine, theirs in zip(("k out", "g", "a", "b"), outputs, expected)}
    errors |= {f"gradient of {name}": relative_error(found[name], exact[name]) for name in inputs if name != "k"}
    errors["gradient of k"] = relative_error(found["k"].masked_fill(short, 0), exact["k"].masked_fill(short, 0))
    return errors | {"gradient of short k": relative_error(found["k"][short], exact["k"][short])}


def output_of_rwkv7(heads: int, width: int, off: int, tokens: int = 5, programs: int = 2048) -> dict[str, float]:
    """o and k batch first, r, v and gate cut from projections; some rows of o next to zero."""
    head_rows._PROGRAMS = programs
    o, r, k, v, gate = (heads_of_rows(tokens, heads, width, off, seed) for seed in range(16, 21))
    random = torch.Generator().manual_seed(21)
    o = o.contiguous() * torch.rand(3, tokens, heads, 1, generator=random) ** 4 + 0.2
    inputs = {"o": o, "r": r, "k": k.contiguous(), "v": v, "gate": gate}
    inputs |= {name: torch.randn(heads * width, generator=random) for name in ("weight", "bias", "r_k")}
    columns = heads_of_rows(tokens, heads, width, off, 22)
    for grad in (columns, head_by_head(columns)):
        (outputs, found), (expected, exact) = against_float64(
            lambda *inputs: rwkv7_output_kernels.Finished.apply(*inputs, 64e-5),
            lambda *inputs: rwkv7_output.by_definition(*inputs, 64e-5),
            inputs,
            (grad,),
        )
    assert sequence_first(outputs[0]) and all(found[name].is_contiguous() for name in ("o", "k"))
    assert all(sequence_first(found[name]) for name in ("r", "v", "gate"))
    errors = {f"gradient of {name}": relative_error(found[name], exact[name]) for name in inputs}
    return errors | {"output": relative_error(outputs[0], expected[0])}


def shift(width: int, mixes: int, chunks: int, documents: bool, programs: int) -> dict[str, float]:
    """x sequence first and batch first; documents that start at, before and after borders of chunks and of programs."""
    token_shift_kernels._PROGRAMS = programs
    random, errors = torch.Generator().manual_seed(23), {}
    rows, first = torch.randn(14, 3, width, generator=random), torch.randn(3, chunks, width, generator=random)
    starts = torch.rand(3, 14, generator=random) < 0.4 if documents else None
    mix, grads = torch.rand(mixes, width, generator=random), torch.randn(mixes, 3, 14, width, generator=random)
    for name, x in (("sequence first", rows.transpose(0, 1)), ("batch first", rows.transpose(0, 1).contiguous())):
        exact = [tensor.double().requires_grad_() for tensor in (x, first, mix)]
        expected = token_shift._mixed(exact[0], exact[1], starts, exact[2])
        of = torch.autograd.grad(expected, exact, grads.double())
        found = token_shift_kernels.gradients(grads, x, first, starts, mix)
        assert found[0].stride() == x.stride()
        errors[f"mixes, {name}"] = relative_error(token_shift_kernels.mixed(x, first, starts, mix), expected)
        errors |= {f"gradient of {what}, {name}": relative_error(*pair) for what, *pair in zip(("x", "first", "mixes"), found, of)}
    return errors


def embedding(tokens: int, words: int, width: int, first: int, dtype: torch.dtype, piece: int) -> dict[str, float]:
    """`words` words from `first` on, one of which is half of the tokens, and as many of other ranks on either side."""
    embedding_kernels._PIECE, embedding_kernels._ROWS, embedding_kernels._COLUMNS = piece, 2, 16
    random = torch.Generator().manual_seed(24)
    given = torch.randint(max(first - words, 0), first + 2 * words, (tokens, 1), generator=random)
    given[torch.rand(tokens, 1, generator=random) < 0.5] = first + words - 1
    weight, grad = (torch.randn(*shape, width, generator=random).to(dtype) for shape in ((words,), (tokens, 1)))
    start = torch.randn(words, width, generator=random)
    total = start.clone()
    embedding_kernels.add_rows_(total, given, grad, first)
    own = F.one_hot((given[:, 0] - first + words).clamp(0, 2 * words), 2 * words + 1)[:, words:-1].double()
    return {
        "rows": relative_error(embedding_kernels.rows_of(given, weight, first)[:, 0], own @ weight.double()),
        "sums": relative_error(total, start.double() + own.T @ grad[:, 0].double()),
    }


if __name__ == "__main__":
    found = {
        f"cross entropy of {words} words, {dtype}": cross_entropy(words, dtype)
        for words in (9, 9000)
        for dtype in (torch.float32, torch.bfloat16)
    }
    found |= {
        f"rotation of {heads} heads of {width}, {sliced=}, {batch_first=}": rotation(heads, width, tables, sliced, batch_first)
        for heads, width, tables in ((3, 8, 1), (17, 6, 2))
        for sliced in (False, True)
        for batch_first in (False, True)
    }
    found |= {f"RMSNorm of {rows} x {width}": rms_norm(rows, width) for rows, width in ((3, 24), (101, 8), (50, 40))}
    found |= {f"SwiGLU of {width}": swiglu(width) for width in (24, 1100)}
    for unit in (False, True):
        found |= {f"SiLU of {heads} heads of {width}, {unit=}": silu(heads, width, unit) for heads, width in ((3, 8), (17, 6), (1, 2))}
        found |= {f"SiLU of {heads} heads of a projection, {unit=}": silu_of_a_projection(heads, unit) for heads in (1, 12)}
    for gate in GATES:
        found |= {
            f"norm and {gate} gate of {heads} heads of {width}, {off} in": gated_norm(heads, width, gate, off)
            for heads, width, off in ((1, 1, 0), (3, 6, 1), (12, 16, 8), (17, 24, 4))
        }
        found[f"norm and {gate} gate, four turns of a program"] = gated_norm(9, 8, gate, 0, tokens=29, programs=16)
    found |= {
        f"gates of {heads} heads, {tokens} tokens": gated_delta_gates(heads, tokens, largest)
        for heads, tokens, largest in ((1, 3, 1), (3, 70, 2), (12, 130, 1), (17, 64, 2))
    }
    found |= {f"copy of {heads} heads of {width}": copied_rows(heads, width) for heads, width in ((3, 8), (17, 6), (12, 1))}
    for heads, width, off in ((1, 2, 1), (3, 6, 1), (12, 16, 8), (17, 24, 4)):
        found[f"inputs of rwkv7, {heads} heads of {width}, {off} in"] = inputs_of_rwkv7(heads, width, off)
        found[f"output of rwkv7, {heads} heads of {width}, {off} in"] = output_of_rwkv7(heads, max(width, 3), off)
    found["inputs of rwkv7, turns of a program"] = inputs_of_rwkv7(2, 128, 0, tokens=29, programs=12)
    found["output of rwkv7, turns of a program"] = output_of_rwkv7(2, 128, 0, tokens=29, programs=12)
    for width, mixes, programs in ((24, 6, 3), (130, 3, 24), (1, 1, 2560)):
        found |= {
            f"token shift of {width}, {mixes} mixes, {chunks=}, {documents=}": shift(width, mixes, chunks, documents, programs)
            for chunks in (1, 2)
            for documents in (False, True)
        }
    for tokens, words, width, first, piece in ((1, 1, 8, 0, 4), (4, 3, 7, 0, 4), (150, 9, 24, 20, 4), (70, 5, 40, 2, 32)):
        found |= {
            f"embedding of {tokens} tokens, {words} words of {width} from {first}, {dtype}": embedding(
                tokens, words, width, first, dtype, piece
            )
            for dtype in (torch.float32, torch.bfloat16)
        }
    for lengths, width, chunk, strongest in (
        ([70], 40, 64, -0.1), ([64], 64, 64, -300.0), ([5, 1, 64, 83], 24, 64, -5.0), ([40], 33, 16, -1e4)
    ):  # fmt: skip
        found[f"scores of gla, {lengths} tokens of {width} in {chunk}, {strongest}"] = gla_scores(lengths, width, chunk, strongest)
    for offset, copied in ((0, False), (0, True), (1, True)):
        found[f"adamw, bfloat16 copies {copied}, from element {offset}"] = adamw_case.errors("cpu", [64, 2048, 4097, 1, 30], offset, copied)
    for copied in (False, True):
        found[f"FusedAdamW, bfloat16 copies {copied}"] = fused_adamw(copied)
    print(json.dumps(found))
