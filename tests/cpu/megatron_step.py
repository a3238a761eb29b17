"""One training step and one checkpoint of a tiny model, with megatron-core alone, in two processes.

    torchrun --nproc-per-node 2 tests/cpu/megatron_step.py FOLDER [--layout dp|pp] [--leave-out REPLACEMENT]

It goes where a run goes: sharded weights, dropout under the forked random state, pipeline or data parallelism, the distributed
optimizer with clipping, its state gathered into an asynchronous checkpoint. `test_platform.py` leaves out one replacement of the
CPU backend at a time and expects this script to fail.
"""

import argparse
import functools
import importlib
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY, LENGTH, MICRO_BATCH, MICRO_BATCHES = 64, 16, 2, 2


def install_backend(leave_out: list[str]) -> None:
    """Install the CPU backend without some of its parts; importing the package itself would install all of them."""
    sys.path.insert(0, str(ROOT))
    package = types.ModuleType("hybrid_megatron.platform")
    package.__path__ = [str(ROOT / "hybrid_megatron" / "platform")]
    sys.modules[package.__name__] = package
    importlib.import_module("hybrid_megatron.platform.cpu_backend").install(leave_out=leave_out)


def run(layout: str, folder: Path) -> None:
    """Build, step, save; raises where megatron-core meets a CUDA assumption."""
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType, ModelType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    stages = 2 if layout == "pp" else 1
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=2, ffn_hidden_size=48, normalization="RMSNorm", gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, hidden_dropout=0.1, attention_dropout=0.1,
        pipeline_model_parallel_size=stages, pipeline_dtype=torch.float32, bias_dropout_fusion=True, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, apply_rope_fusion=False, calculate_per_token_loss=True,
    )  # fmt: skip
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)),
            mlp_bda=get_bias_dropout_add,
        ),
    )

    class Model(MegatronModule):
        """Embedding, two layers, output and loss; a pipeline stage has one half of it."""

        def __init__(self) -> None:
            super().__init__(config)
            self.model_type = ModelType.encoder_or_decoder
            self.share_embeddings_and_output_weights = False
            self.pre_process, self.post_process = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
            if self.pre_process:
                self.embedding = LanguageModelEmbedding(config, VOCABULARY, LENGTH, position_embedding_type="none")
            specs = TransformerBlockSubmodules(layer_specs=[layer] * (config.num_layers // stages), layer_norm=WrappedTorchNorm)
            self.decoder = TransformerBlock(config, specs, pre_process=self.pre_process, post_process=self.post_process)
            self.rope = RotaryEmbedding(config.kv_channels, rotary_percent=1.0)
            if self.post_process:
                self.output = ColumnParallelLinear(
                    config.hidden_size, VOCABULARY, config=config, init_method=config.init_method, bias=False
                )

        def set_input_tensor(self, tensor) -> None:
            self.decoder.set_input_tensor(tensor[0] if isinstance(tensor, list) else tensor)

        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(tokens, torch.arange(LENGTH)) if self.pre_process else None
            causal = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
            hidden = self.decoder(hidden, causal, rotary_pos_emb=self.rope(LENGTH))
            if not self.post_process:
                return hidden
            logits, _ = self.output(hidden)
            return tensor_parallel.vocab_parallel_cross_entropy(logits, labels.T.contiguous())

    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=True)
    model = DistributedDataParallel(config, ddp_config, Model())
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0, use_distributed_optimizer=True, bf16=False), [model]
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    data_rank = parallel_state.get_data_parallel_rank()
    text = torch.randint(0, VOCABULARY, (MICRO_BATCHES, MICRO_BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(data_rank))

    def loss(output: torch.Tensor):
        total, tokens = output.sum(), torch.tensor(output.numel(), dtype=torch.int)
        return total, tokens, {"loss": total.detach() / tokens}

    def forward(batches, model):
        batch = next(batches)
        return model(batch[:, :-1], batch[:, 1:]), loss

    step = functools.partial(
        get_forward_backward_func(), forward_step_func=forward, model=model, num_microbatches=MICRO_BATCHES, seq_length=LENGTH,
        micro_batch_size=MICRO_BATCH,
    )  # fmt: skip
    model.zero_grad_buffer()
    losses = step(data_iterator=iter(text), forward_only=False)
    assert all(torch.isfinite(entry["loss"]) for entry in losses)
    succeeded, norm, _ = optimizer.step()
    assert succeeded and 0 < norm < 100
    compiled = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
    assert not compiled, f"megatron-core compiled {compiled} functions"

    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
    }
    state = {"model": model.module.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.sharded_state_dict(dict(state), metadata=metadata)
    request = dist_checkpointing.save(state, str(folder), async_sharded_save=True, async_strategy="mcore")
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    # Context parallelism cuts the table of rotary angles over its ranks: here over the two processes.
    assert get_pos_emb_on_this_cp_rank(model.module.rope(LENGTH), 0, dist.group.WORLD).shape[0] == LENGTH // 2


def main() -> None:
    """Parse, install what is asked for, run, and leave the process group in order."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layout", choices=("dp", "pp"), default="dp")
    parser.add_argument("--leave-out", action="append", default=[])
    arguments = parser.parse_args()
    install_backend(arguments.leave_out)
    dist.init_process_group("gloo")
    try:
        run(arguments.layout, arguments.folder)
    finally:
        dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main()
