"""megatron-core's distributed optimizer over AdamW: who is decayed, where states and parameters lie, clipping."""

import torch

from hybrid_megatron import platform  # before megatron.core
import megatron.core.optimizer as megatron_optimizer
from hybrid_megatron.checkpoint.dp_reshardable import mend_dp_reshardable
from hybrid_megatron.config.megatron import optimizer_config
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.training.adamw import FusedAdamW
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    ParamGroupOverride,
    ParamKey,
    distrib_optimizer,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def build_optimizer(config: RunConfig, model: list[DistributedDataParallel]) -> MegatronOptimizer:
    """The distributed optimizer over FusedAdamW, for all chunks of a rank.

    No weight decay for vectors (norms, biases, decays), megatron-core's standard rule, and what is marked `no_weight_decay` (the matrices
    of gates).
    """
    _use_fused_adamw()
    settings = optimizer_config(config)
    overrides = get_standard_config_overrides(settings) | {ParamKey(attr="no_weight_decay"): ParamGroupOverride(wd_mult=0.0)}
    optimizer = get_megatron_optimizer(settings, model, config_overrides=overrides)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        _find_states_where_they_are(part)
        mend_dp_reshardable(part)
        _begin_states(part)
        if platform.is_cuda():
            _copy_with_the_update(part)
    return optimizer


def _begin_states(optimizer: DistributedOptimizer) -> None:
    """Moments of 0 after 0 steps, so that a checkpoint can be taken before the first update, which may have been skipped."""
    optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    for group in optimizer.optimizer.param_groups:
        group["step"] = 0


def _find_states_where_they_are(optimizer: DistributedOptimizer) -> None:
    """Mend megatron-core's map from a model parameter to its place in the optimizer, which checkpoints are written and read by.

    The optimizer's groups hold float32 parameters before the masters of bfloat16 ones, while megatron-core numbers them in the order of its
    gradient buffers. In a group with both (norms beside the decays of linear mixers) a checkpoint would hold another parameter's state.
    """
    optimizer.model_param_group_index_map = {
        parameter: (group, place)
        for group, (float32, bfloat16) in enumerate(zip(optimizer.model_fp32_groups, optimizer.model_float16_groups, strict=True))
        for place, parameter in enumerate([*float32, *bfloat16])
    }


def _copy_with_the_update(optimizer: DistributedOptimizer) -> None:
    """The kernel that updates float32 masters writes this rank's parts of the bfloat16 parameters, in place of megatron-core's copies.
    Parameters in float32 are their own masters."""
    if optimizer.is_stub_optimizer:
        return
    optimizer.optimizer.copies = {master: None for masters in optimizer.shard_fp32_groups for master in masters}
    for masters, parameters in zip(optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups, strict=True):
        for master, parameter in zip(masters, parameters, strict=True):
            buffer, _, bucket = optimizer.model_param_gbuf_map[parameter]
            part = optimizer._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
            optimizer.optimizer.copies[master] = optimizer.buffers[buffer].buckets[bucket].param_data.view(-1)[part.start : part.end]
    optimizer._copy_main_params_to_model_params = lambda: None


def set_hyperparameters(optimizer: MegatronOptimizer, lr: float, weight_decay: float) -> None:
    """Put this step's learning rate and weight decay into every group; the group's own factors say which go without."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_mult"]
        group["weight_decay"] = weight_decay * group["wd_mult"]


def clip_next_step(optimizer: MegatronOptimizer, max_norm: float, norm: float) -> None:
    """Have the next step divide gradients whose global norm is `norm` by (norm + 1e-6) / max_norm where that is above 1, as megatron-core's
    clip_grad_by_total_norm_fp32 does in a pass of its own."""
    divisor = min((norm + 1e-6) / max_norm, torch.finfo(torch.float32).max)
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:  # of a rank without parameters
            part.optimizer.divisor = divisor if divisor > 1 else None


def _use_fused_adamw() -> None:
    """Stand in where megatron-core looks for Apex's FusedAdam, whether or not Apex or TE is installed."""
    megatron_optimizer.Adam = distrib_optimizer.Adam = FusedAdamW
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True
    distrib_optimizer.USING_TE_OPTIMIZER = False
