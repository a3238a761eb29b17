"""Kernels of our own in flash-linear-attention's functions, by its registry of backends (fla/backends.py): for GLA's scores within chunks.

FLA's own models, beside which `launch bench --peers` measures, run in processes that do not register them.
"""

from functools import lru_cache


@lru_cache
def register_own_kernels() -> None:
    """Once a process, before the first of FLA's functions that they stand in for."""
    from fla.backends import BaseBackend, register
    from fla.ops.utils import prepare_chunk_indices

    from hybrid_megatron.ops.kernels import gla_scores

    class OwnKernels(BaseBackend):
        backend_type, priority = "hybrid_megatron", 0

        def chunk_gla_fwd_intra_gk(self, q, k, g, scale, cu_seqlens=None, chunk_size=64, chunk_indices=None):
            if cu_seqlens is not None and chunk_indices is None:
                chunk_indices = prepare_chunk_indices(cu_seqlens, chunk_size)
            return gla_scores.scores(q, k, g, scale, cu_seqlens, chunk_size, chunk_indices)

        def chunk_gla_bwd_dqk_intra(self, q, k, g, dA, cu_seqlens=None, chunk_size=64, chunk_indices=None):
            if cu_seqlens is not None and chunk_indices is None:
                chunk_indices = prepare_chunk_indices(cu_seqlens, chunk_size)
            return gla_scores.gradients(q, k, g, dA, cu_seqlens, chunk_size, chunk_indices)

    register("gla")(OwnKernels)
