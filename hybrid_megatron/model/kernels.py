"""Whether the kernels of a plan's mixers can be trusted on this GPU; asked before a run or an evaluation begins."""

from hybrid_megatron import platform
from hybrid_megatron.config.megatron import parameter_dtype
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.errors import RunError
from hybrid_megatron.model.head_group import HeadGroup
from hybrid_megatron.model.mixers import MIXERS
from hybrid_megatron.model.pattern import LayerPlan
from hybrid_megatron.ops.kernel_check import kernel_problem
from hybrid_megatron.ops.tuned_kernels import use_tuned_kernels


def check_kernels(config: RunConfig, plan: LayerPlan) -> None:
    """Raise RunError if flash-linear-attention's kernels compute wrong values here: by the versions known to, then by trying.

    On a CPU nothing is asked: the forms that run there are the project's own, in torch.
    """
    groups = _groups(plan)
    if not groups or not platform.is_cuda():
        return
    if problem := platform.kernel_pair_problem():
        raise RunError(problem)
    use_tuned_kernels(platform.device_name())
    for mixer, group in groups.items():
        heads = group.heads // config.parallel.tensor
        problem = kernel_problem(mixer, heads, config.model.head_dim, parameter_dtype(config), platform.device())
        if problem is not None:
            raise RunError(problem)


def tuning_of_kernels(plan: LayerPlan) -> str | None:
    """What is known beforehand about the fastest configurations of FLA's kernels on this GPU, for the screen; None where none are used."""
    if not _groups(plan) or not platform.is_cuda():
        return None
    device = platform.device_name()
    if use_tuned_kernels(device):
        return f"configurations tuned on {device}"
    return (
        f"no tuned configurations for {device}: the first step looks for the fastest, minutes, once a machine (benchmarks/tune_kernels.py)"
    )


def _groups(plan: LayerPlan) -> dict[str, HeadGroup]:
    """Of each mixer that uses FLA's kernels, one."""
    return {group.mixer: group for layer in plan for group in layer.groups if MIXERS[group.mixer].needs_fla}
