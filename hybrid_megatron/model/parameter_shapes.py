"""Names and whole shapes of a model's parameters as they stand in its checkpoints, from the recipe alone: no process group, no memory."""

from types import SimpleNamespace

from torch._subclasses.fake_tensor import FakeTensorMode

from hybrid_megatron.config.megatron import transformer_config
from hybrid_megatron.config.schema import ParallelConfig, RunConfig
from hybrid_megatron.model.head_group import HeadGroup
from hybrid_megatron.model.mixers import MIXERS
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.model.unit_order import UnitOrder

Shapes = dict[str, tuple[int, ...]]

_ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def parameter_shapes(config: RunConfig) -> Shapes:
    """Of a model that can be built, in the order of its layers. Raises ConfigError if its pattern does not come out even."""
    model = config.model
    hidden, vocabulary = model.hidden_size, (model.vocab_size, model.hidden_size)
    shapes: Shapes = {"embedding.word_embeddings.weight": vocabulary}
    inner: dict[HeadGroup, Shapes] = {}  # layers repeat, and mixers are built to be asked
    for layer in plan_layers(config):
        for group in set(layer.groups) - inner.keys():
            inner[group] = _inner_shapes(config, group)
        order = UnitOrder(model, layer.groups)
        own = {f"mixers.{i}.{name}": shape for i, group in enumerate(layer.groups) for name, shape in inner[group].items()}
        projections = {"shared_proj": (order.shared, hidden), "in_proj": (order.rows, hidden), "out_proj": (hidden, order.columns)}
        own |= {f"{name}.weight": shape for name, shape in projections.items() if 0 not in shape}
        of_layer = {
            "input_layernorm.weight": (hidden,),
            **{f"self_attention.{name}": shape for name, shape in own.items()},
            "pre_mlp_layernorm.weight": (hidden,),
            "mlp.linear_fc1.weight": (2 * model.ffn_size, hidden),
            "mlp.linear_fc2.weight": (hidden, model.ffn_size),
        }
        shapes |= {f"decoder.layers.{layer.number - 1}.{name}": shape for name, shape in of_layer.items()}
    return shapes | {"decoder.final_layernorm.weight": (hidden,), "output_layer.weight": vocabulary}


def _inner_shapes(config: RunConfig, group: HeadGroup) -> Shapes:
    """Of a mixer's own parameters, as it makes them when no other rank has a part of it."""
    alone = SimpleNamespace(tp=_ALONE, cp=_ALONE)
    with FakeTensorMode():
        mixer = MIXERS[group.mixer](transformer_config(config), config.model, group, ParallelConfig(), alone, layer_number=1)
    return {name: tuple(parameter.shape) for name, parameter in mixer.named_parameters()}
