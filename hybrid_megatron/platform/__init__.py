"""Where the program runs: CUDA, or a CPU that megatron-core is made to accept.

    import hybrid_megatron.platform as platform      # before the first import of megatron.core
    platform.device(), platform.backend(), platform.peak_flops()

Importing this package activates the CPU backend where there is no CUDA; where there is, it says which cuDNN Transformer Engine takes and
changes nothing else. Only the modules of megatron.core see the CPU backend: `torch.cuda` stays what it is for everybody else, so our own
code asks `device()` and `is_cuda()` and never calls `torch.cuda.current_device()`, `tensor.cuda()` or `torch.cuda.get_rng_state()`
unguarded.
"""

from hybrid_megatron.platform import cpu_backend
from hybrid_megatron.platform.device import (
    backend,
    device,
    device_name,
    gpus_given,
    is_cuda,
    kernel_pair_problem,
    node_name,
    peak_flops,
    peak_memory_gib,
    select_device,
    synchronize,
    torch_sees_none,
    transformer_engine_problem,
    visible_devices,
)
from hybrid_megatron.platform.host import available_host_memory, cores
from hybrid_megatron.platform.one_cudnn import share_cudnn_of_torch
from hybrid_megatron.platform.quiet import silence_megatron

__all__ = [
    "available_host_memory",
    "backend",
    "cores",
    "device",
    "device_name",
    "gpus_given",
    "is_cuda",
    "kernel_pair_problem",
    "node_name",
    "peak_flops",
    "peak_memory_gib",
    "select_device",
    "synchronize",
    "torch_sees_none",
    "transformer_engine_problem",
    "visible_devices",
]

silence_megatron()
if is_cuda():
    share_cudnn_of_torch()
cpu_backend.install()
