"""Layer plan -> module specs: what megatron-core's TransformerBlock builds, one spec for each layer of a model chunk."""

from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.model.linear import linears
from hybrid_megatron.model.mixer_layer import MixerLayer
from hybrid_megatron.model.norm import norms
from hybrid_megatron.model.pattern import Layer, LayerPlan
from hybrid_megatron.model.swiglu import SwiGLU
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules, get_transformer_layer_offset


def chunk_specs(config: TransformerConfig, run: RunConfig, plan: LayerPlan, stage: int, chunk: int) -> TransformerBlockSubmodules:
    """Specs of the layers in model chunk `chunk` of pipeline stage `stage`, and of the final norm."""
    first = get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=stage)
    count = get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage)
    specs = [_layer_spec(run, layer) for layer in plan.layers[first : first + count]]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norms(run.model.kernels.norm).final)


def _layer_spec(run: RunConfig, layer: Layer) -> ModuleSpec:
    """norm -> mixer -> add -> norm -> SwiGLU -> add."""
    linear, norm = linears(run.model.kernels.linear), norms(run.model.kernels.norm)

    def mlp(config, pg_collection, **further):
        submodules = MLPSubmodules(linear_fc1=linear.column, linear_fc2=linear.row, activation_func=SwiGLU)
        return MLP.as_mlp_submodule(submodules, config=config, pg_collection=pg_collection, **further)

    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm.residual,
            self_attention=ModuleSpec(module=MixerLayer, params={"model": run.model, "parallel": run.parallel, "layer": layer}),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm.residual,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
