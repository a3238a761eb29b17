"""Parameters, FLOPs and bytes of a model, from the recipe alone, by what each mixer says of itself.

FLOPs are the model's own work: matrix products and the mixers' recurrences, causal halves counted as halves; no norms, no activation
functions, nothing recomputed. One multiply-add is two. LongCE's passes over short contexts are work of the method, and counted: an `mfu` is
that of all the model's FLOPs in a step, and `tokens_per_second_per_gpu` shows what LongCE costs.
"""

from dataclasses import dataclass

from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.model.head_group import HeadGroup
from hybrid_megatron.model.mixers import MIXERS
from hybrid_megatron.model.pattern import LayerPlan
from hybrid_megatron.ops.longce import Windows


@dataclass(frozen=True)
class Accounts:
    params: dict[str, int]
    """Parameters by part: one entry a mixer, then mlp, norms, embedding, output_layer."""
    forward_flops_per_token: dict[str, float]
    """Forward FLOPs of one token by part, averaged over the positions of a sample."""
    short_flops_per_token: float
    """Forward FLOPs of LongCE's short contexts, for each token of a sample; 0 without LongCE."""
    state_bytes: dict[str, int]
    """By mixer: what one sample of `train.context` tokens leaves for its continuation; recurrent states in 4 bytes an element, a window's
    or all keys and values in 2."""
    activation_bytes: dict[str, int]
    """By mixer, and `order` for copies that bring a head-wise layer's rows together: what one sample of `train.context` tokens keeps for
    the backward pass between the inputs of the projections of all its layers, nothing recomputed and on one rank."""
    context_bytes: dict[str, int]
    """By mixer: what the busiest context rank receives in the forward pass of a sample, over all layers; 0 without context parallelism."""
    context_backward_bytes: dict[str, int]
    """The same of the backward pass, at most."""

    @property
    def total_params(self) -> int:
        return sum(self.params.values())

    @property
    def flops_per_token(self) -> float:
        """Forward and backward: the backward pass takes two products for each of the forward pass. With LongCE, its short contexts too."""
        return 3 * sum(self.forward_flops_per_token.values()) + self.short_flops_per_token


def account(config: RunConfig, plan: LayerPlan) -> Accounts:
    """The model of `config`, with activations in the type of `train.precision`."""
    model, context, parallel = config.model, config.train.context, config.parallel
    element = {"bf16": 2, "fp32": 4}[config.train.precision]
    groups = [group for layer in plan for group in layer.groups]

    def by_mixer(of) -> dict:
        sums: dict[str, float] = {}
        for group in groups:
            sums[group.mixer] = sums.get(group.mixer, 0) + of(MIXERS[group.mixer], group)
        return sums

    params = by_mixer(lambda mixer, group: mixer.num_params(model, group))
    flops = by_mixer(lambda mixer, group: mixer.flops(model, group, context, context) / context)
    mlp = 3 * model.hidden_size * model.ffn_size * model.num_layers
    vocabulary = model.vocab_size * model.hidden_size
    params |= {"mlp": mlp, "norms": (2 * model.num_layers + 1) * model.hidden_size, "embedding": vocabulary, "output_layer": vocabulary}
    flops |= {"mlp": 2 * mlp, "output_layer": 2 * vocabulary}
    return Accounts(
        params,
        flops,
        short_flops_per_token=_short_flops(config, groups) / context if config.longce.enabled else 0.0,
        state_bytes=by_mixer(lambda mixer, group: mixer.state_bytes(model, group, context)),
        activation_bytes=by_mixer(lambda mixer, group: mixer.activation_bytes(model, group, context, element)),
        context_bytes=by_mixer(lambda mixer, group: mixer.context_bytes(model, group, context, parallel, element)),
        context_backward_bytes=by_mixer(lambda mixer, group: mixer.context_backward_bytes(model, group, context, parallel, element)),
    )


def _short_flops(config: RunConfig, groups: list[HeadGroup]) -> int:
    """Forward FLOPs of LongCE's windows of one sample: their tokens through all layers, their scored ones through the output layer."""
    model, windows = config.model, Windows(config.train.context, config.longce.window, config.longce.stride)
    mixers = sum(MIXERS[group.mixer].flops(model, group, windows.length, windows.length) for group in groups)
    mlp = 2 * 3 * model.hidden_size * model.ffn_size * model.num_layers * windows.length
    output_layer = 2 * model.vocab_size * model.hidden_size * windows.stride
    return windows.count * (mixers + mlp + output_layer)
