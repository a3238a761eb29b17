"""What one would train with instead, at the same width, depth, FFN and vocabulary: Hugging Face's Llama under torch.compile, and FLA's own
models. Each with its own default loss, weights and moments in bfloat16 as its users have them, and torch's fused AdamW.

FLA's Mamba2 is no peer: without the package mamba_ssm its layer falls back to a form in plain torch that nobody would train with."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hybrid_megatron import platform
from hybrid_megatron.benchmarking.cells import PROFILED_STEPS, Cell
from hybrid_megatron.benchmarking.measure import describe, device_bytes, memory_gib
from hybrid_megatron.benchmarking.profile import profile_steps
from hybrid_megatron.benchmarking.sizing import config_of
from hybrid_megatron.benchmarking.steps import time_steps
from hybrid_megatron.config.schema import ModelConfig, PatternEntry, RunConfig
from hybrid_megatron.errors import RunError
from hybrid_megatron.model.accounting import account
from hybrid_megatron.model.mixers.rwkv7 import RWKV7
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.ops.tuned_kernels import use_tuned_kernels


@dataclass(frozen=True)
class Peer:
    title: str
    settings: Callable[[ModelConfig, int], object]
    """(model, context) -> its configuration in transformers."""
    like: PatternEntry
    """Layers of ours with as many FLOPs."""
    compiled: bool = False
    needs_cuda: bool = True


def _llama(model: ModelConfig, context: int):
    from transformers import LlamaConfig

    return LlamaConfig(
        **_sizes(model),
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads or model.num_heads,
        head_dim=model.head_dim,
        max_position_embeddings=context,
        attn_implementation="sdpa",
    )


def _fla_gdn(model: ModelConfig, context: int):
    from fla.models import GatedDeltaNetConfig

    return GatedDeltaNetConfig(**_sizes(model), num_heads=model.num_heads, head_dim=model.head_dim, expand_v=1.0)


def _fla_gla(model: ModelConfig, context: int):
    from fla.models import GLAConfig

    return GLAConfig(**_sizes(model), num_heads=model.num_heads, expand_k=1.0, expand_v=1.0)


def _fla_kda(model: ModelConfig, context: int):
    from fla.models import KDAConfig

    return KDAConfig(**_sizes(model), num_heads=model.num_heads, head_dim=model.head_dim, expand_v=1.0)


def _fla_rwkv7(model: ModelConfig, context: int):
    """With the bottlenecks of our own layers, RWKV-7's value residual and channel mixing: two matrices for SwiGLU's three."""
    from fla.models import RWKV7Config

    decay, rate, gate = RWKV7.ranks_of(model)
    ranks = {"decay_low_rank_dim": decay, "a_low_rank_dim": rate, "gate_low_rank_dim": gate}
    sizes = _sizes(model) | {"intermediate_size": model.ffn_size * 3 // 2}
    return RWKV7Config(**sizes, **ranks, head_dim=model.head_dim)


def _sizes(model: ModelConfig) -> dict:
    return {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "intermediate_size": model.ffn_size,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": False,
        "use_cache": False,
    }


_PEERS = {
    "llama": Peer("Hugging Face Llama", _llama, PatternEntry(mixer="attention", position="rope"), compiled=True, needs_cuda=False),
    "fla_gdn": Peer("FLA Gated DeltaNet", _fla_gdn, PatternEntry(mixer="gdn")),
    "fla_gla": Peer("FLA GLA", _fla_gla, PatternEntry(mixer="gla")),
    "fla_kda": Peer("FLA Kimi Delta Attention", _fla_kda, PatternEntry(mixer="kda")),
    "fla_rwkv7": Peer("FLA RWKV-7", _fla_rwkv7, PatternEntry(mixer="rwkv7")),
}


def measure_peer(cell: Cell, process_began: float) -> dict:
    """As `measure`, for one GPU. `mfu` takes the FLOPs of our own layers of the same kind (`like`)."""
    peer = _PEERS[cell.peer]
    if peer.needs_cuda and not platform.is_cuda():
        raise RunError(f"{peer.title} is made of Triton kernels and needs a CUDA device")
    platform.select_device()
    if platform.is_cuda():
        use_tuned_kernels(platform.device_name())  # what FLA would find in the first minutes
    config = config_of(cell, 1, device_bytes())
    model = build_peer(peer, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if peer.compiled and platform.is_cuda() else model  # on a CPU compiling takes longer than the steps
    draw = torch.Generator().manual_seed(config.seed)
    batches = [
        torch.randint(config.model.vocab_size, (config.train.micro_batch, cell.context), generator=draw).to(platform.device())
        for _ in range(4)
    ]
    losses: list[torch.Tensor] = []

    def step() -> None:
        tokens = batches[len(losses) % len(batches)]
        loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    timing = time_steps(step)
    like = replace(config, pattern=[peer.like])
    row = describe(config, timing, process_began, account(like, plan_layers(like)).flops_per_token) | memory_gib()
    return row | {
        "recompute": "none",
        "gpus": 1,
        "layout": None,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "planned_memory_gib": None,
        "profile": profile_steps(step, PROFILED_STEPS) if cell.profile else None,
        "first_loss": losses[0].item(),
        "last_loss": losses[-1].item(),
    }


def build_peer(peer: Peer, config: RunConfig) -> torch.nn.Module:
    """On the device, in the type of `train.precision`."""
    from transformers import AutoModelForCausalLM

    usual = torch.get_default_dtype()
    torch.set_default_dtype({"bf16": torch.bfloat16, "fp32": torch.float32}[config.train.precision])
    try:
        with platform.device():
            return AutoModelForCausalLM.from_config(peer.settings(config.model, config.train.context)).train()
    finally:
        torch.set_default_dtype(usual)
