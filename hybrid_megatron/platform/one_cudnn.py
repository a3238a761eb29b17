"""One cuDNN in a process: Transformer Engine looks for the system's first, beside which torch's parts do not load.

Its fused attention is then refused (CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED, with NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2). Source of the order:
transformer_engine/common/__init__.py, _load_cuda_library_from_system.
"""

import os
from importlib.util import find_spec
from pathlib import Path


def share_cudnn_of_torch() -> None:
    """Before the first import of Transformer Engine, which megatron-core makes too. Nothing where it is not installed."""
    if find_spec("transformer_engine") is None:
        return
    if folder := folder_of_library("libcudnn.so", Path("/proc/self/maps").read_text()):
        os.environ["CUDNN_HOME"] = folder  # the first place it looks in; a cuDNN of another choice would be the second one


def folder_of_library(name: str, maps: str) -> str | None:
    """Where the library lies that a process has loaded, by its memory map (proc_pid_maps(5)); None if it has none of that name."""
    for line in maps.splitlines():
        _, *path = line.split(maxsplit=5)[4:]
        if path and Path(path[0]).name.startswith(name):
            return str(Path(path[0]).parent)
    return None
