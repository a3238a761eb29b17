"""AdamW (Loshchilov and Hutter, 2019, arXiv 1711.05101) by fused kernels, as megatron-core's distributed optimizer calls it."""

from collections.abc import Callable

import torch


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
