"""AdamW's kernel against Loshchilov and Hutter's algorithm 2 in float64."""

import torch
from torch import Tensor

from tests.definitions import relative_error


def errors(device: str, sizes: list[int], offset: int, copied: bool) -> dict[str, float]:
    """After three steps with other rates and divisors each: relative errors of values, moments, and the float32 values' copies.

    Tensors lie one after the other, `offset` elements behind the beginning of their memory; the second one's gradient moves. With
    `copied`, all but the last one have a copy.
    """
    from hybrid_megatron.ops.kernels.adamw import AdamWUpdate

    generator = torch.Generator().manual_seed(0)

    def parts(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[Tensor]:
        memory = torch.randn(offset + sum(sizes), generator=generator).mul(scale).to(device, dtype)
        return list(memory[offset:].split(sizes))

    values, firsts, seconds, gradients = parts(), parts(scale=0.0), parts(scale=0.0), parts(scale=0.0)
    copies = [*parts(torch.bfloat16)[:-1], None] if copied else [None] * len(sizes)
    exact, first, second = [x.double() for x in values], [0.0] * len(sizes), [0.0] * len(sizes)
    betas, eps, update = (0.9, 0.95), 1e-8, AdamWUpdate()
    for step, (lr, weight_decay, divisor) in enumerate(((1e-2, 0.1, 1.0), (3e-3, 0.1, 2.5), (1e-3, 0.0, 1.0)), 1):
        for gradient in gradients:
            gradient.copy_(torch.randn(gradient.shape, generator=generator))
        if step == 2:
            gradients[1] = gradients[1].clone()
        given = [x.clone() for x in gradients]
        rates = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "step": step, "divisor": divisor}
        update(values, gradients, firsts, seconds, copies, **rates)
        assert all(torch.equal(x, before) for x, before in zip(gradients, given))
        for i, g in enumerate(x.double() / divisor for x in gradients):
            first[i] = betas[0] * first[i] + (1 - betas[0]) * g
            second[i] = betas[1] * second[i] + (1 - betas[1]) * g * g
            direction = first[i] / (1 - betas[0] ** step) / ((second[i] / (1 - betas[1] ** step)).sqrt() + eps)
            exact[i] = exact[i] - lr * weight_decay * exact[i] - lr * direction
    found = {"values": (values, exact), "first moments": (firsts, first), "second moments": (seconds, second)}
    if copied:
        found["copies"] = (copies[:-1], [x.bfloat16() for x in values[:-1]])
    return {name: relative_error(torch.cat(mine), torch.cat(theirs)) for name, (mine, theirs) in found.items()}
