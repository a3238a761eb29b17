"""Every test here is marked `gpu` and is skipped, with the reason, where there is no CUDA device."""

from pathlib import Path

import pytest
import torch

from tests.cpu.ranks import Ranks

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder; skip it without CUDA or with a triton that miscomputes on this GPU."""
    reason = None
    if not torch.cuda.is_available():
        reason = "needs a CUDA device, and torch sees none here"
    else:
        from hybrid_megatron import platform

        reason = platform.kernel_pair_problem()
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def quick_kernels() -> None:
    """No minutes of autotuning for shapes that only tests use; those of recipes take what is tuned."""
    if torch.cuda.is_available():
        from hybrid_megatron import platform
        from hybrid_megatron.ops.tuned_kernels import use_tuned_kernels
        from tests.gpu.untuned import spare_autotuning

        use_tuned_kernels(platform.device_name())
        spare_autotuning()


@pytest.fixture(autouse=True)
def free_memory():
    """Give the cached memory back between tests: the float64 definitions take gigabytes."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def gpus():
    """Living processes, a GPU each: at most eight."""
    group = Ranks(min(torch.cuda.device_count(), 8))
    yield group
    group.close()
