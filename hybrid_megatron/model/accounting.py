"""Parameters and FLOPs of a model, from the recipe alone, by what each mixer says of itself.

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

    @property
    def total_params(self) -> int:
        return sum(self.params.values())

    @property
    def flops_per_token(self) -> float:
        """Forward and backward: the backward pass takes two products for each of the forward pass."""
        return 3 * sum(self.forward_flops_per_token.values())


def account(config: RunConfig, plan: LayerPlan) -> Accounts:
    model, context = config.model, config.train.context
    params: dict[str, int] = {}
    flops: dict[str, float] = {}
    for layer in plan:
        mixer = MIXERS[layer.mixer]
        params[layer.mixer] = params.get(layer.mixer, 0) + mixer.num_params(model)
        flops[layer.mixer] = flops.get(layer.mixer, 0) + mixer.flops(model, context, context) / context
    mlp = 3 * model.hidden_size * model.ffn_size * model.num_layers
    vocabulary = model.vocab_size * model.hidden_size
    params |= {"mlp": mlp, "norms": (2 * model.num_layers + 1) * model.hidden_size, "embedding": vocabulary, "output_layer": vocabulary}
    flops |= {"mlp": 2 * mlp, "output_layer": 2 * vocabulary}
    return Accounts(params, flops)
