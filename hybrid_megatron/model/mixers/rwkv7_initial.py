"""What RWKV-7's parameters (Peng et al., 2025, arXiv 2503.14456) begin from, as its authors' code and FLA have it.

Each function takes the shape of the whole parameter, a generator, the layer's number from 1 and the model. Curves over the channels run
over the group's heads, so in a head-wise layer a mixer with fewer heads still has its whole range of decays. An orthogonal matrix of 3,072
rows takes 6 s on one core.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_megatron.config.schema import ModelConfig

type Draw = Callable[[tuple[int, ...], torch.Generator, int, ModelConfig], Tensor]


def _orthogonal(gain: float) -> Draw:
    def draw(shape, generator, layer, model) -> Tensor:
        return torch.nn.init.orthogonal_(torch.empty(shape), gain=gain, generator=generator)

    return draw


def _constant(value: float) -> Draw:
    return lambda shape, generator, layer, model: torch.full(shape, value)


def _up(shape, generator, layer, model) -> Tensor:
    """A tenth of an orthogonal matrix, so that a bottleneck wider than its result gives no less."""
    return _orthogonal(0.1 * max(shape[1] / shape[0], 1.0) ** 0.5)(shape, generator, layer, model)


def _shift_mix(shape, generator, layer, model) -> Tensor:
    """1 - (i/h)^(p (1 - depth)): the first channels look back, and the deeper the layer the fewer do."""
    place = torch.arange(shape[1]) / shape[1]
    powers = torch.tensor([0.2, 0.7, 0.7, 0.9, 0.9, 0.2])  # of r, k, v, w, a, g
    return 1 - place ** (powers[:, None] * (1 - (layer - 1) / model.num_layers))


def _decay_bias(shape, generator, layer, model) -> Tensor:
    """From -5.5 up to 0.5 over the channels, flatter at first in deeper layers, and a curve from -2.5 to 2.5 over each head's."""
    depth = (layer - 1) / max(model.num_layers - 1, 1)
    rising = torch.linspace(0, 1, shape[0]) ** (1 + depth**0.3)
    return -6 + 6 * rising + 0.5 + 2.5 * _within_heads(shape, model)


def _rate_bias(shape, generator, layer, model) -> Tensor:
    return -0.19 + 0.3 * _within_heads(shape, model) + 0.4 * _over_channels(shape)


def _k_k(shape, generator, layer, model) -> Tensor:
    return 0.71 - 0.1 * _over_channels(shape)


def _norm_weight(shape, generator, layer, model) -> Tensor:
    return torch.full(shape, (layer / model.num_layers) ** 0.7)


def _over_channels(shape: tuple[int, ...]) -> Tensor:
    """From -1/2 to 1/2."""
    return torch.linspace(-0.5, 0.5, shape[0])


def _within_heads(shape: tuple[int, ...], model: ModelConfig) -> Tensor:
    """x |x| for x from -1 to 1 over the channels of each head."""
    x = torch.linspace(-1, 1, model.head_dim)
    return (x * x.abs()).repeat(shape[0] // model.head_dim)


DRAWS: dict[str, Draw] = {
    "r_proj": _orthogonal(1.0),
    "k_proj": _orthogonal(0.1),
    "v_proj": _orthogonal(1.0),
    "down": _constant(0.0),
    "up": _up,
    "decay_bias": _decay_bias,
    "rate_bias": _rate_bias,
    "k_k": _k_k,
    "k_a": _constant(1.02),
    "r_k": _constant(-0.04),
    "out_norm_weight": _norm_weight,
    "out_norm_bias": _constant(0.0),
    "shift_mix": _shift_mix,
}
