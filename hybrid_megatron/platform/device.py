"""Facts about the device this process runs on."""

import os
import re
import resource
import socket
import sys

import torch
from packaging.version import Version

from hybrid_megatron.errors import NodeError

_GIB = 2**30

# Dense bf16 tensor-core peak in FLOP/s, by the name the driver reports; NVIDIA's datasheets print twice these figures "with
# sparsity". The whole name must match: a MIG slice ("NVIDIA H200 MIG 1g.18gb") or a special edition is not the full device.
_PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    (r"NVIDIA H200", 989e12),  # H200 datasheet: SXM 1,979 with sparsity
    (r"NVIDIA H200 NVL", 835.5e12),  # H200 datasheet: NVL 1,671 with sparsity
    (r"NVIDIA H100 80GB HBM3", 989e12),  # H100 datasheet: SXM 1,979 with sparsity
    (r"NVIDIA H100 NVL", 835.5e12),  # H100 datasheet: NVL 1,671 with sparsity
    (r"NVIDIA H100 PCIe", 756e12),  # H100 PCIe product brief: 1,513 with sparsity
    (r"(NVIDIA )?A100-SXM4-(40|80)GB", 312e12),  # A100 datasheet: 312, the same for SXM and PCIe
    (r"(NVIDIA )?A100-PCIE-40GB", 312e12),
    (r"NVIDIA A100 80GB PCIe", 312e12),
)


def is_cuda() -> bool:
    """Whether there is a CUDA device to run on."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device of this process: the current CUDA device (set it with `torch.cuda.set_device`), or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda() else torch.device("cpu")


def select_device() -> None:
    """Make this process' own GPU, by LOCAL_RANK as torchrun sets it, the current one. Before anything else touches CUDA.

    Raises NodeError where there are fewer GPUs than processes, or none although Slurm gave some.
    """
    if not is_cuda():
        if given := gpus_given():
            raise NodeError(f"{node_name()}: {torch_sees_none(given)}")
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    if (seen := torch.cuda.device_count()) < processes:
        raise NodeError(
            f"{node_name()}: torch sees {seen} GPUs for {processes} processes; start {seen} (--nproc-per-node {seen}, or "
            "PROCESSES_PER_NODE in cluster.env), or ask Slurm for more GPUs"
        )
    torch.cuda.set_device(local_rank)


def visible_devices() -> list[str]:
    """The GPUs that this process sees, each as CUDA_VISIBLE_DEVICES names it."""
    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(index) for index in range(count)]


def gpus_given() -> str | None:
    """GPUs that Slurm gave this node, in its words; None where it gave none, or where training on the CPU is meant (cluster.env)."""
    if os.environ.get("HYBRID_MEGATRON_ALLOW_CPU") == "yes":
        return None
    if (number := os.environ.get("SLURM_GPUS_ON_NODE")) is not None:
        return f"SLURM_GPUS_ON_NODE={number}" if number not in ("", "0") else None
    return f"SLURM_JOB_GPUS={indices}" if (indices := os.environ.get("SLURM_JOB_GPUS")) else None


def torch_sees_none(given: str) -> str:
    """What is wrong then, and the ways out."""
    built = (
        f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"torch {torch.__version__} has no CUDA"
    )
    return (
        f"Slurm gave it GPUs ({given}) and torch sees none, so this would run on the CPU; {built}: look whether nvidia-smi there names "
        "them and a driver that is new enough (CUDA 13 needs 580), and whether a container is given them (--nv); where the CPU is meant, "
        "export HYBRID_MEGATRON_ALLOW_CPU=yes in slurm/cluster.env"
    )


def node_name() -> str:
    """What Slurm calls this node, since that is what `--exclude` takes; elsewhere its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def device_name() -> str:
    """What to call this device in messages."""
    return torch.cuda.get_device_name() if is_cuda() else "CPU"


def backend() -> str:
    """The torch.distributed backend that moves this device's tensors."""
    return "nccl" if is_cuda() else "gloo"


def synchronize() -> None:
    """Wait until the device has done everything asked of it so far."""
    if is_cuda():
        torch.cuda.synchronize()


def peak_memory_gib() -> float:
    """Peak memory of this process so far, in GiB: of tensors on the GPU, or of the whole process on a CPU (RSS)."""
    if is_cuda():
        return torch.cuda.max_memory_allocated() / _GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / _GIB  # bytes on macOS, KiB on Linux


def peak_flops() -> float | None:
    """Dense bf16 peak of this device in FLOP/s, or None where it is not known: then there is no MFU, never a guess."""
    return peak_flops_of(torch.cuda.get_device_name()) if is_cuda() else None


def peak_flops_of(name: str) -> float | None:
    """The figure of `peak_flops` for a device of this name."""
    return next((peak for pattern, peak in _PEAK_FLOPS if re.fullmatch(pattern, name)), None)


def kernel_pair_problem() -> str | None:
    """What is wrong with triton and this GPU taken together, in one sentence; None if nothing is."""
    if not is_cuda():
        return None
    import triton  # exists on Linux only

    return kernel_pair_problem_of(triton.__version__, torch.cuda.get_device_capability(), torch.cuda.get_device_name())


def transformer_engine_problem() -> str | None:
    """Why Transformer Engine does not serve on this GPU, in one sentence; None if it does, and on a CPU, which never takes it."""
    if not is_cuda():
        return None
    try:
        import transformer_engine.pytorch  # noqa: F401  the plain package hides what goes wrong
    except Exception as error:  # a library that is missing, of another CUDA or another torch: an error of its own each
        reason = next(iter(str(error).strip().splitlines()), "")
        return f"importing transformer_engine.pytorch fails ({type(error).__name__}: {reason})"
    return None


def kernel_pair_problem_of(triton_version: str, capability: tuple[int, int], name: str) -> str | None:
    """The sentence of `kernel_pair_problem` for a triton version and a GPU."""
    # flash-linear-attention issue 640; FLA itself refuses the same pair in ops/common/chunk_o.py.
    if capability[0] == 9 and Version("3.4.0") <= Version(triton_version) < Version("3.7.1"):
        return (
            f"triton {triton_version} computes wrong gradients for gated linear attention on {name} (Hopper; triton 3.4.0 to 3.7.0 do, "
            "flash-linear-attention issue 640): install triton 3.7.1 or newer, for example with: pip install 'triton>=3.7.1'"
        )
    return None
