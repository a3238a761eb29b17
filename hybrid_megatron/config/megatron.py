"""RunConfig -> megatron-core's configs. The only place that names megatron-core's settings."""

import torch
import torch.nn.functional as F
from torch.distributed import ProcessGroup

import hybrid_megatron.platform  # noqa: F401  before megatron.core: activates the CPU backend where there is no CUDA
from hybrid_megatron.config.schema import RunConfig
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig


def parameter_dtype(config: RunConfig) -> torch.dtype:
    """Type of parameters and activations; what must be float32 under bf16 is so by its own module."""
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[config.train.precision]


_RECOMPUTE = {
    "none": {},
    # Of megatron-core's modules our layers have `mlp` and `layernorm`, and `layernorm` compiles a C++ extension when it first runs.
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def transformer_config(config: RunConfig) -> TransformerConfig:
    """For TransformerBlock, the parallel linear layers and the pipeline schedules.

    Gradients are summed over micro-batches and ranks (`calculate_per_token_loss`) of losses that training/step.py divides by the number
    of predicted tokens of the whole batch, so a loss does not depend on how the batch is cut. Fusions that need Apex or TE are off.
    `use_te_activation_func` is megatron-core's name for an activation that is a module: ours (model/swiglu.py), with TE or without.
    """
    model, parallel = config.model, config.parallel
    interleaved = parallel.virtual_pipeline > 1
    dtype = parameter_dtype(config)
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        num_query_groups=model.num_kv_heads or model.num_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,  # model/initialize.py draws every parameter, independent of the layout
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.sequence,
        context_parallel_size=parallel.context,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if interleaved else None,
        # Batched messages mix up the two directions between two stages when each is the other's predecessor and successor.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        **_RECOMPUTE[config.train.recompute],
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        use_te_activation_func=True,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def sharding_metadata(dp_cp_group: ProcessGroup, optimizer: str = "fully_reshardable") -> dict:
    """How dist_checkpointing shards states; one choice for saving, loading and initialising, but for the optimizer's (checkpoint/form.py).

    `non_homogeneous_layers`: layers of one model may differ.
    """
    return {
        "distrib_optim_sharding_type": optimizer,
        "non_homogeneous_layers": True,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": dp_cp_group,
    }


def ddp_config(ranks: int) -> DistributedDataParallelConfig:
    """Gradients are reduced in float32 over `ranks` of data times context, each keeping the optimizer state of its share.

    They are reduced during the last micro-batch's backward pass, bucket by bucket (training/buckets.py), as soon as it has made a bucket's
    gradients; `bucket_size`, in elements, is megatron-core's default.
    """
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=ranks > 1,
        overlap_param_gather=False,
        bucket_size=max(40_000_000, 1_000_000 * ranks) if ranks > 1 else None,
        check_for_nan_in_grad=False,  # training/step.py checks loss and gradient norm, and says so without a traceback
    )


def optimizer_config(config: RunConfig) -> OptimizerConfig:
    """AdamW under the distributed optimizer, float32 master weights. The learning rate is set before each step by training/schedule.py."""
    optimizer, dtype = config.optimizer, parameter_dtype(config)
    return OptimizerConfig(
        optimizer="adam",
        lr=optimizer.peak_lr,
        min_lr=config.schedule.min_lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_eps=optimizer.eps,
        clip_grad=optimizer.clip_grad,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_distributed_optimizer=True,
        log_num_zeros_in_grad=False,
    )
