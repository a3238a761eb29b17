"""Whether the kernels of a plan's mixers can be trusted on this GPU; asked before a run or an evaluation begins."""

from hybrid_megatron import platform
from hybrid_megatron.config.megatron import parameter_dtype
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.errors import RunError
from hybrid_megatron.model.mixers import MIXERS
from hybrid_megatron.model.pattern import LayerPlan
from hybrid_megatron.ops.kernel_check import kernel_problem
from hybrid_megatron.ops.tuned_kernels import use_tuned_kernels


def check_kernels(config: RunConfig, plan: LayerPlan) -> None:
    """Raise RunError if flash-linear-attention's kernels compute wrong values here: by the versions known to, then by trying.

    On a CPU nothing is asked: the forms that run there are the project's own, in torch.
    """
    groups = {group.mixer: group for layer in plan for group in layer.groups if MIXERS[group.mixer].needs_fla}
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
