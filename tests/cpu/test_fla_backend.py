"""Our kernels in FLA's functions: under the names and with the arguments that FLA calls; one that FLA does not know would never run."""

import inspect

import pytest

from hybrid_megatron.ops import fla_backend


@pytest.fixture(scope="module")
def chunk():
    pytest.importorskip("triton")
    from fla.ops.gla import chunk

    fla_backend.register_own_kernels()
    return chunk


@pytest.mark.parametrize(
    "function, kernel, given",
    [
        ("chunk_gla_fwd_intra_gk", "scores", ("q", "k", "g", "scale", "cu_seqlens", "chunk_size", "chunk_indices")),
        ("chunk_gla_bwd_dqk_intra", "gradients", ("q", "k", "g", "dA", "cu_seqlens", "chunk_size", "chunk_indices")),
    ],
)
def test_fla_calls_our_kernels(chunk, monkeypatch, function, kernel, given):
    """By name, as it does; with chunks of its own where sequences come without."""
    from hybrid_megatron.ops.kernels import gla_scores

    monkeypatch.setattr(gla_scores, kernel, lambda *arguments: arguments)
    called = getattr(chunk, function)
    assert tuple(inspect.signature(inspect.unwrap(called)).parameters) == given
    arguments = {name: name for name in given}
    assert called(**arguments) == given
    monkeypatch.setattr("fla.ops.utils.prepare_chunk_indices", lambda *_: "made")
    fla_backend.register_own_kernels.__wrapped__()  # which replaces what is registered
    assert called(**arguments | {"chunk_indices": None})[-1] == "made"
    assert called(**arguments | {"cu_seqlens": None, "chunk_indices": None})[-1] is None
