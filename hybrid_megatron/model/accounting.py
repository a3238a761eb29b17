"""Parameters, FLOPs and bytes of a model, from the recipe alone, by what each mixer says of itself.

FLOPs are the model's own work: matrix products and the mixers' recurrences, causal halves counted as halves; no norms, no activation
functions, nothing recomputed. One multiply-add is two.
"""

from dataclasses import dataclass

from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.model.mixers import MIXERS
from hybrid_megatron.model.pattern import LayerPlan


@dataclass(frozen=True)
class Accounts:
    params: dict[str, int]
    """Parameters by part: one entry a mixer, then mlp, norms, embedding, output_layer."""
    forward_flops_per_token: dict[str, float]
    """Forward FLOPs of one token by part, averaged over the positions of a sample."""
    state_bytes: dict[str, int]
    """By mixer: what one sample of `train.context` tokens leaves for its continuation; recurrent states in 4 bytes an element, a window's
    or all keys and values in 2."""
    activation_bytes: dict[str, int]
    """By mixer: what one sample keeps for the backward pass between the projections of all its layers."""
    context_bytes: dict[str, int]
    """By mixer: what the busiest context rank receives in the forward pass of a sample, over all layers; 0 without context parallelism."""

    @property
    def total_params(self) -> int:
        return sum(self.params.values())

    @property
    def flops_per_token(self) -> float:
        """Forward and backward: the backward pass takes two products for each of the forward pass."""
        return 3 * sum(self.forward_flops_per_token.values())


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
        state_bytes=by_mixer(lambda mixer, group: mixer.state_bytes(model, group, context)),
        activation_bytes=by_mixer(lambda mixer, group: mixer.activation_bytes(model, group, context, element)),
        context_bytes=by_mixer(lambda mixer, group: mixer.context_bytes(model, group, context, parallel, element)),
    )
