"""The whole model by its definition, in float64, on one process: what the fast forms are measured against.

Takes the parameters by their global names, as a checkpoint holds them.
"""

import torch
from torch import Tensor

from hybrid_megatron.config import RunConfig
from hybrid_megatron.model.mixer_layer import layer_reference
from hybrid_megatron.model.pattern import plan_layers


def reference_loss(
    config: RunConfig, weights: dict[str, Tensor], tokens: Tensor, targets: Tensor, document_starts: Tensor | None = None
) -> Tensor:
    """Mean cross entropy of tokens [b, s] in nats; differentiable in `weights`."""
    return reference_losses(config, weights, tokens, targets, document_starts).mean()


def reference_losses(
    config: RunConfig, weights: dict[str, Tensor], tokens: Tensor, targets: Tensor, document_starts: Tensor | None = None
) -> Tensor:
    """[b, s] cross entropy of each token in nats."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.model.norm_eps).sqrt() * weight

    x = weights["embedding.word_embeddings.weight"][tokens]
    for layer in plan_layers(config):
        here = f"decoder.layers.{layer.number - 1}."
        mixer = {name.removeprefix(here + "self_attention."): w for name, w in weights.items() if name.startswith(here + "self_attention.")}
        hidden = norm(x, weights[here + "input_layernorm.weight"])
        x = x + layer_reference(mixer, hidden, config.model, layer, document_starts)
        gate, up = (norm(x, weights[here + "pre_mlp_layernorm.weight"]) @ weights[here + "mlp.linear_fc1.weight"].T).chunk(2, -1)
        x = x + (gate * torch.sigmoid(gate) * up) @ weights[here + "mlp.linear_fc2.weight"].T
    logits = norm(x, weights["decoder.final_layernorm.weight"]) @ weights["output_layer.weight"].T
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(tokens.shape)
