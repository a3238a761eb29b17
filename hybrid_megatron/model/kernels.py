"""Which kernels compute a plan's layers on this GPU, and whether they can be trusted; asked before a run or an evaluation begins.

On a CPU nothing is asked: what runs there is torch, and the project's own forms in it.
"""

from importlib.metadata import version

from hybrid_megatron import platform
from hybrid_megatron.config.megatron import parameter_dtype
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.errors import RunError
from hybrid_megatron.model.attention.backends import BACKENDS, first_that_runs
from hybrid_megatron.model.head_group import HeadGroup
from hybrid_megatron.model.mixers import MIXERS
from hybrid_megatron.model.pattern import LayerPlan
from hybrid_megatron.ops.kernel_check import kernel_problem
from hybrid_megatron.ops.tuned_kernels import use_tuned_kernels


def check_kernels(config: RunConfig, plan: LayerPlan) -> None:
    """Raise RunError if Transformer Engine is asked for and not there, if the attention kernel that is asked for does not run here, or if
    flash-linear-attention's kernels compute wrong values: by the versions known to, then by trying."""
    if not platform.is_cuda():
        return
    if problem := transformer_engine_problem(config):
        raise RunError(problem)
    groups = _groups(plan)
    if "attention" in groups and attention_backend(config, groups["attention"]) is None:
        heads, kv_heads = _local_heads(config, groups["attention"])
        raise RunError(
            f"model.attention.backend={config.model.attention.backend}: it does not run on {platform.device_name()} with {heads} heads "
            f"over {kv_heads} of keys and values, {config.model.head_dim} channels each, in {config.train.precision}; take another of "
            f"{', '.join(BACKENDS)}"
        )
    linear = _linear(groups)
    if not linear:
        return
    if problem := platform.kernel_pair_problem():
        raise RunError(problem)
    use_tuned_kernels(platform.device_name())
    for mixer, group in linear.items():
        heads = group.heads // config.parallel.tensor
        problem = kernel_problem(mixer, heads, config.model.head_dim, parameter_dtype(config), platform.device())
        if problem is not None:
            raise RunError(problem)


def asked_of_transformer_engine(config: RunConfig) -> str:
    """The settings that name it, as overrides; empty if none does."""
    kernels = config.model.kernels
    settings = {
        "model.attention.backend": config.model.attention.backend,
        "model.kernels.linear": kernels.linear,
        "model.kernels.norm": kernels.norm,
    }
    return ", ".join(f"{key}={value}" for key, value in settings.items() if value == "te")


def transformer_engine_problem(config: RunConfig) -> str | None:
    """Why it does not serve here, in one sentence, where the recipe asks for it."""
    asked = asked_of_transformer_engine(config)
    if not asked or not (problem := platform.transformer_engine_problem()):
        return None
    return (
        f"{asked}: {problem}; install Transformer Engine (pip install --no-build-isolation -c constraints.txt -e '.[te]', where CUDA's "
        "compiler is), or leave the settings out"
    )


def kernels_taken(config: RunConfig, plan: LayerPlan) -> str | None:
    """For the screen: what computes the layers on this GPU, and what is known beforehand of the fastest configurations. None on a CPU."""
    if not platform.is_cuda():
        return None
    kernels, groups = config.model.kernels, _groups(plan)
    told = [f"linear layers by {kernels.linear}, norms by {kernels.norm}"]
    if "attention" in groups:
        told.append(f"attention by {attention_backend(config, groups['attention'])}")
    if "swa" in groups:
        told.append("windows by flex")
    if linear := _linear(groups):
        told.append(f"{', '.join(linear)} by flash-linear-attention {version('flash-linear-attention')}, {_tuning()}")
    return "; ".join(told)


def attention_backend(config: RunConfig, group: HeadGroup) -> str | None:
    """Of full attention on this GPU (attention/backends.py); None if the one that is asked for does not run."""
    if config.data.document_mask or group.inference.window is not None:
        return "flex"  # whatever is asked for
    model, heads = config.model, _local_heads(config, group)
    return first_that_runs(model.attention.backend, *heads, model.head_dim, parameter_dtype(config), platform.device())


def _local_heads(config: RunConfig, group: HeadGroup) -> tuple[int, int]:
    """Of queries, and of keys and values, on a tensor rank."""
    tensor = config.parallel.tensor
    return group.heads // tensor, MIXERS[group.mixer].units(config.model, group) // tensor


def _tuning() -> str:
    device = platform.device_name()
    if use_tuned_kernels(device):
        return f"configurations tuned on {device}"
    return (
        f"no tuned configurations for {device}: the first step looks for the fastest, minutes, once a machine (benchmarks/tune_kernels.py)"
    )


def _groups(plan: LayerPlan) -> dict[str, HeadGroup]:
    """Of each mixer one."""
    return {group.mixer: group for layer in plan for group in layer.groups}


def _linear(groups: dict[str, HeadGroup]) -> dict[str, HeadGroup]:
    """Those that use FLA's kernels."""
    return {mixer: group for mixer, group in groups.items() if MIXERS[mixer].needs_fla}
