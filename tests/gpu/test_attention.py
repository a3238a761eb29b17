"""Full and windowed attention on CUDA against softmax attention in float64, from the very same rounded inputs; kernels and memory.

Errors are relative norms. bf16: the probabilities and the results are rounded once each, 2^-9 at most, so 1e-2 bounds outputs and
gradients (2e-3 to 4e-3 is usual). float32: the efficient kernel splits each float32 into TF32 parts, bound 2e-5; FlexAttention multiplies
in TF32 where torch allows it ("highest" precision, the default, does not), same bound.
"""

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hybrid_megatron import platform
from hybrid_megatron.model.attention import backends, causal, windowed
from hybrid_megatron.model.attention.backends import BACKENDS, first_that_runs
from hybrid_megatron.model.attention.causal import causal_attention
from hybrid_megatron.model.attention.windowed import windowed_attention
from hybrid_megatron.parallel import SequenceLayout
from tests import definitions

BOUND = {torch.bfloat16: 1e-2, torch.float32: 2e-5}
DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def compiled_anew():
    """Each test with its own shapes alone, as in a training; torch.compile keeps a limited number of them."""
    torch.compiler.reset()


def draw(batch: int, length: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(batch, length, n, width, device="cuda").to(dtype) for n in (heads, kv_heads, kv_heads)]


def with_gradients(function, inputs: list[Tensor]) -> dict[str, Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    o = function(*leaves)
    torch.manual_seed(1)
    weights = torch.randn(o.shape, device="cuda", dtype=torch.float64)
    (o.double() * weights).sum().backward()
    return {"output": o} | {f"gradient of {name}": x.grad for name, x in zip("qkv", leaves)}


def compare(fast: dict[str, Tensor], exact: dict[str, Tensor], bound: float) -> None:
    """Relative to each tensor's own norm; to the largest where that is zero (the gradients of q and k in a sample of one token)."""
    norms = {name: float(x.norm()) for name, x in exact.items()}
    largest = max(norms.values())
    scales = {name: norm if norm > 1e-10 * largest else largest for name, norm in norms.items()}
    errors = {name: float((fast[name].double() - x).norm()) / scales[name] for name, x in exact.items()}
    print(errors)
    worst = max(errors, key=errors.get)
    assert errors[worst] <= bound, f"{worst}: {errors[worst]:.2e}, all: {errors}"


def check(inputs: list[Tensor], starts: Tensor | None = None) -> None:
    scale = inputs[0].shape[-1] ** -0.5
    layout = SequenceLayout(inputs[0].shape[1], document_starts=starts)
    fast = with_gradients(lambda q, k, v: causal_attention(q, k, v, layout, scale, None), inputs)
    assert fast["output"].dtype == inputs[0].dtype
    exact = with_gradients(lambda q, k, v: definitions.causal_attention(q, k, v, scale, starts), [x.double() for x in inputs])
    compare(fast, exact, BOUND[inputs[0].dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize(("length", "width"), [(1, 128), (77, 64), (1024, 128), (2047, 128)])
def test_whole_samples(dtype, kv_heads, length, width):
    """Heads of their own and in groups; lengths that fill no tile."""
    check(draw(2, length, 8, kv_heads, width, dtype))


def test_long_sample():
    check(draw(1, 8192, 2, 1, 128, torch.bfloat16))


def starts_at(length: int, *rows: tuple[int, ...]) -> Tensor:
    starts = torch.zeros(len(rows), length, dtype=torch.bool, device="cuda")
    for row, places in zip(starts, rows):
        row[list(places)] = True
    return starts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "length"), [(4, 512), (2, 333)])
def test_documents(dtype, kv_heads, length):
    """FlexAttention: rows of their own documents, one beginning amid a document, one without any start."""
    starts = starts_at(length, (0, 1, 2, 128, 200), (100, 256), ())
    check(draw(3, length, 4, kv_heads, 64, dtype), starts)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend(backend, dtype, kv_heads):
    """Whole samples, and queries that are the last half of the keys' span, as the second of two chunks; those that do not run say so."""
    inputs = draw(2, 512, 4, kv_heads, 64, dtype)
    if first_that_runs(backend, 4, kv_heads, 64, dtype, inputs[0].device) is None:
        if backend == "te" and platform.transformer_engine_problem():
            pytest.skip("Transformer Engine is not installed")
        assert backend in ("cudnn", "flash", "te") and dtype == torch.float32, "kernels of 16-bit types alone"
        return

    def over(attention):
        def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return torch.cat((attention(q, k, v), attention(q[:, :, 256:], k, v)), dim=2).transpose(1, 2)

        return both

    fast = with_gradients(over(lambda q, k, v: backends.causal(q, k, v, 0.125, backend)), inputs)
    exact = with_gradients(over(lambda q, k, v: backends.causal(q, k, v, 0.125, "math")), [x.double() for x in inputs])
    compare(fast, exact, BOUND[dtype])


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "documents"),
    [(dtype, kv_heads, False) for dtype in DTYPES for kv_heads in (4, 2)] + [(torch.bfloat16, 2, True)],
)
def test_chunked_queries(monkeypatch, dtype, kv_heads, documents):
    """Under context parallelism each of a rank's two chunks of queries meets the keys up to its own end (lower-right causal)."""
    length, size = 768, 2
    inputs = draw(2, length, 4, kv_heads, 64, dtype)
    starts = starts_at(length, (0, 100, 192, 500), (191, 400, 576)) if documents else None
    monkeypatch.setattr(causal, "_gather_keys_and_values", lambda k, v, layout, group: (k, v))  # they are whole already

    def over_ranks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = torch.zeros_like(q)
        for rank in range(size):
            layout = SequenceLayout(length, size, rank, starts)
            positions = layout.positions("cuda")
            part = causal_attention(q[:, positions], k, v, layout, 0.125, None)
            o = o.index_copy(1, positions, part)
        return o

    fast = with_gradients(over_ranks, inputs)
    exact = with_gradients(lambda q, k, v: definitions.causal_attention(q, k, v, 0.125, starts), [x.double() for x in inputs])
    compare(fast, exact, BOUND[dtype])


WINDOWS = [
    # length, window, head dim, rows of document starts: a window as wide as the sample is full attention
    (1, 128, 64, None),
    (63, 128, 128, None),
    (65, 128, 64, None),
    (63, 16, 64, None),
    (65, 16, 128, ((0, 1, 2, 40), (30,))),
    (1000, 128, 64, None),
    (1000, 128, 128, ((0, 1, 2, 128, 500, 999), ())),
    (4096, 2048, 128, None),
    (4096, 2048, 64, ((0, 1000, 1001, 3500),)),
]


@pytest.mark.parametrize(("length", "window", "width", "rows"), WINDOWS)
def test_windows(length, window, width, rows):
    """bf16, heads in groups; samples that fill no block."""
    starts = None if rows is None else starts_at(length, *rows)
    inputs = draw(2 if rows is None else len(rows), length, 4, 2, width, torch.bfloat16)
    layout, scale = SequenceLayout(length, document_starts=starts), width**-0.5
    fast = with_gradients(lambda q, k, v: windowed_attention(q, k, v, layout, window, scale, None), inputs)
    assert fast["output"].dtype == torch.bfloat16
    doubles = [x.double() for x in inputs]
    exact = with_gradients(lambda q, k, v: definitions.windowed_attention(q, k, v, window, scale, starts), doubles)
    compare(fast, exact, BOUND[torch.bfloat16])


@pytest.mark.parametrize("documents", [False, True])
def test_windows_over_chunks(monkeypatch, documents):
    """Under context parallelism a chunk's keys begin window - 1 tokens before it, or with the sample."""
    length, size, window = 768, 2, 128
    inputs = draw(2, length, 4, 2, 64, torch.bfloat16)
    starts = starts_at(length, (0, 100, 192, 500), (191, 400, 576)) if documents else None

    def cut_from_whole(k: Tensor, v: Tensor, layout: SequenceLayout, window: int, group: None) -> list[tuple[Tensor, Tensor]]:
        ends = [(chunk + 1) * layout.chunk_length for chunk in layout.chunks]
        spans = [slice(max(end - layout.chunk_length - window + 1, 0), end) for end in ends]
        return [(k[:, span], v[:, span]) for span in spans]

    monkeypatch.setattr(windowed, "_keys_and_values", cut_from_whole)

    def over_ranks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = torch.zeros_like(q)
        for rank in range(size):
            layout = SequenceLayout(length, size, rank, starts)
            positions = layout.positions("cuda")
            o = o.index_copy(1, positions, windowed_attention(q[:, positions], k, v, layout, window, 0.125, None))
        return o

    fast = with_gradients(over_ranks, inputs)
    doubles = [x.double() for x in inputs]
    exact = with_gradients(lambda q, k, v: definitions.windowed_attention(q, k, v, window, 0.125, starts), doubles)
    compare(fast, exact, BOUND[torch.bfloat16])


def operators(function) -> set[str]:
    """Names of the operators that a call ran."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        function()
    return {event.key for event in profiled.key_averages()}


def test_plain_causal_attention_runs_in_cudnn():
    """Forward and backward, at the shapes of a training."""
    q, k, v = (x.requires_grad_() for x in draw(8, 4096, 12, 12, 128, torch.bfloat16))
    names = operators(lambda: causal_attention(q, k, v, SequenceLayout(4096), 128**-0.5, None).float().sum().backward())
    assert {"aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_cudnn_attention_backward"} <= names, sorted(names)


@pytest.mark.parametrize("kv_heads", [12, 4])
def test_a_later_chunk_runs_in_cudnn(kv_heads):
    """Its own keys and the earlier ones, forward and backward."""
    q, k, v = (x.requires_grad_() for x in draw(1, 4096, 12, kv_heads, 128, torch.bfloat16))
    names = operators(
        lambda: backends.causal(*(x.transpose(1, 2) for x in (q[:, 3072:], k, v)), 128**-0.5, "auto").float().sum().backward()
    )
    assert {"aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_cudnn_attention_backward"} <= names, sorted(names)
    assert {f"aten::_scaled_dot_product_{other}_attention" for other in ("flash", "efficient")}.isdisjoint(names), sorted(names)


@pytest.mark.parametrize(("dtype", "kv_heads"), [(torch.bfloat16, 4), (torch.float32, 12), (torch.float32, 4)])
def test_no_form_falls_back_to_the_whole_score_matrix(dtype, kv_heads):
    q, k, v = draw(1, 1024, 12, kv_heads, 128, dtype)
    names = operators(lambda: causal_attention(q, k, v, SequenceLayout(1024), 128**-0.5, None))
    assert "aten::_scaled_dot_product_attention_math" not in names, sorted(names)


def peak_bytes(function) -> int:
    """Most memory in use while `function` runs, beyond what was in use before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("chunked", [False, True])
def test_memory_grows_with_the_length_alone(chunked):
    """bf16, 32K tokens, 2 heads: q, k and v are 16 MiB each; a [s, s] mask would be 1 GiB, scores in bf16 4 GiB."""
    length = 32_768
    q, k, v = (x.requires_grad_() for x in draw(1, length, 2, 2, 128, torch.bfloat16))
    queries = q[:, length // 2 :] if chunked else q

    def step() -> None:
        backends.causal(*(x.transpose(1, 2) for x in (queries, k, v)), 128**-0.5, "auto").float().sum().backward()

    assert peak_bytes(step) < 400 * 2**20


def test_memory_of_document_masks_grows_with_the_length_alone():
    """As above, after the compilation."""
    length = 32_768
    q, k, v = (x.requires_grad_() for x in draw(1, length, 2, 2, 128, torch.bfloat16))
    layout = SequenceLayout(length, document_starts=starts_at(length, (0, 5000, 9000)))

    def step() -> None:
        causal_attention(q, k, v, layout, 128**-0.5, None).float().sum().backward()

    step()
    assert peak_bytes(step) < 400 * 2**20


def test_memory_of_windows_grows_with_the_length_alone():
    """As above."""
    length = 32_768
    q, k, v = (x.requires_grad_() for x in draw(1, length, 2, 2, 128, torch.bfloat16))

    def step() -> None:
        windowed_attention(q, k, v, SequenceLayout(length), 2048, 128**-0.5, None).float().sum().backward()

    step()
    assert peak_bytes(step) < 400 * 2**20


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 16])
def test_slices_between_rows_of_other_mixers(dtype, window):
    """q, k and v of a head-wise layer: strides and starts that are no multiple of 16 bytes, which cuDNN's kernel read wrongly."""
    torch.manual_seed(0)
    rows = torch.randn(2, 200, 4, 3 * 64 + 3, device="cuda").to(dtype)
    layout = SequenceLayout(200)

    def sliced(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return rows[..., 1:193].split(64, dim=-1)

    def fast(rows: Tensor) -> Tensor:
        return (
            windowed_attention(*sliced(rows), layout, window, 0.125, None)
            if window
            else causal_attention(*sliced(rows), layout, 0.125, None)
        )

    def exact(rows: Tensor) -> Tensor:
        return definitions.windowed_attention(*sliced(rows), window or 200, 0.125)

    results = []
    for form, leaf in ((fast, rows.detach().requires_grad_()), (exact, rows.detach().double().requires_grad_())):
        o = form(leaf)
        o.backward(torch.linspace(-1, 1, o.numel(), device="cuda").view_as(o).to(o.dtype))
        results.append({"output": o.detach(), "gradient of the rows": leaf.grad})
    compare(*results, BOUND[dtype])
