"""Gradients of weights, added to megatron-core's float32 gradient buffers by the matrix product that makes them.

megatron-core calls an extension of Apex for it, fused_weight_gradient_mlp_cuda. This is the same in torch: gradients are not rounded to
bfloat16 on their way, and a copy and a sum of every weight's gradient are saved. The output layer, whose gradient is made with the loss,
adds it itself where the same switch is on (ops/linear_cross_entropy.py), and Transformer Engine's linear layers have a form of their own.
"""

from types import SimpleNamespace

from hybrid_megatron.ops.matmul import add_matmul_
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import layers


def add_weight_gradients_by_matmul(model: list[DistributedDataParallel]) -> None:
    """For the parallel linear layers of chunks with gradient buffers; not where a weight is put in order before it multiplies.

    The embedding, which multiplies nothing, has the switch as well: it adds its gradient, row by row (ops/embedding.py).
    """
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=_add)
    for chunk in model:
        for module in chunk.modules():
            if hasattr(module, "gradient_accumulation_fusion") and not getattr(module, "rearranges_weight", False):
                module.gradient_accumulation_fusion = True


def _add(inputs, grad, total) -> None:
    """total [n, k] += grad^T inputs, of grad [t, n] and inputs [t, k]."""
    add_matmul_(total, grad.t(), inputs)
