"""AdamW (Loshchilov and Hutter, 2019, arXiv 1711.05101) under megatron-core's distributed optimizer."""

from collections.abc import Callable

import torch

from hybrid_megatron import platform  # before megatron.core
import megatron.core.optimizer as megatron_optimizer
from hybrid_megatron.checkpoint.dp_reshardable import mend_dp_reshardable
from hybrid_megatron.config.megatron import optimizer_config
from hybrid_megatron.config.schema import RunConfig
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


class FusedAdamW(torch.optim.Optimizer):
    """One fused kernel a parameter group, on CUDA our own, which writes bfloat16 parameters too, keeping its state as megatron-core's
    distributed optimizer expects it.

    megatron-core is written against Apex's and TE's FusedAdam: the step count lives in the parameter group and a parameter's state is
    exp_avg and exp_avg_sq alone. With torch's own AdamW it cannot resume (it puts one step tensor into all parameters, each of which then
    counts it up).
    """

    divisor: float | None = None
    """What the next step, and it alone, divides gradients by as it reads them. On a CPU the kernel writes them back divided."""

    def __init__(self, params, lr, betas, eps, weight_decay, adam_w_mode=True, capturable=False):
        assert adam_w_mode and not capturable
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.copies: dict[torch.Tensor, torch.Tensor | None] = {}
        """Where, on CUDA, a step writes parameters in bfloat16 too, if there is an entry: for all of them then, None where it does not."""
        self._updates: dict[int, Callable] = {}
        """Of each group, on CUDA."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        assert closure is None
        divisor, self.divisor = self.divisor, None
        for number, group in enumerate(self.param_groups):
            group["step"] = int(group.get("step", 0)) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            moments = [[self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq")]
            (self._by_kernel if params[0].is_cuda else _by_torch)(number, group, params, [p.grad for p in params], *moments, divisor)

    def _by_kernel(self, number: int, group: dict, params, gradients, firsts, seconds, divisor: float | None) -> None:
        if number not in self._updates:
            from hybrid_megatron.ops.kernels.adamw import AdamWUpdate  # Triton exists on Linux only

            self._updates[number] = AdamWUpdate()
        hyperparameters = {name: group[name] for name in ("lr", "weight_decay", "betas", "eps", "step")}
        copies = [self.copies[p] if self.copies else None for p in params]
        self._updates[number](params, gradients, firsts, seconds, copies, **hyperparameters, divisor=divisor or 1.0)


def _by_torch(_: int, group: dict, params, gradients, firsts, seconds, divisor: float | None) -> None:
    torch._fused_adamw_(
        params,
        gradients,
        firsts,
        seconds,
        [],
        [torch.full((), float(group["step"]))] * len(params),
        lr=float(group["lr"]),
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        grad_scale=None if divisor is None else torch.full((), divisor),
        found_inf=None,
    )


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
