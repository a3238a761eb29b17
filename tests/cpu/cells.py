"""What runs inside the ranks of parity tests: one step's loss and gradients, and short trainings."""

import dataclasses
import gc
import json
from pathlib import Path

import torch

from hybrid_megatron import platform
from hybrid_megatron.config import load_recipe
from hybrid_megatron.config.megatron import ddp_config, sharding_metadata
from hybrid_megatron.data import BatchStream, open_dataset
from hybrid_megatron.model.hybrid_model import build_chunks
from hybrid_megatron.model.initialize import sharded_tensors
from hybrid_megatron.model.mixers import Mixer
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.parallel import start
from hybrid_megatron.training.build import reduced
from hybrid_megatron.training.loop import train
from hybrid_megatron.training.signals import StopRequest
from hybrid_megatron.training.step import Losses, forward_backward
from megatron.core.dist_checkpointing.mapping import apply_factories


def losses(words: list[str]) -> list[dict] | None:
    """Train by the recipe; rank 0 returns the lines of metrics.jsonl."""
    outcome = train(load_recipe(words), StopRequest())
    assert outcome.complete
    return [json.loads(line) for line in (outcome.run_dir / "metrics.jsonl").read_text().splitlines()]


def loss_and_gradients(words: list[str], at_step: int = 0) -> tuple[float, list[tuple], list[tuple]]:
    """As `losses_and_gradients`, with the loss alone."""
    losses, parameters, gradients = losses_and_gradients(words, at_step)
    return losses.loss, parameters, gradients


def losses_and_gradients(words: list[str], at_step: int = 0) -> tuple[Losses, list[tuple], list[tuple]]:
    """One step's losses, and this rank's shards of parameters and gradients as (name, whole shape, offset, tensor).

    Without the distributed optimizer, which would leave only each rank's own share reduced.
    """
    config = load_recipe(words)
    platform.select_device()
    data = open_dataset(config, "train")
    with start(config.parallel, config.seed) as state:
        chunks = build_chunks(config, plan_layers(config), state)
        wrapped = reduced(chunks, dataclasses.replace(ddp_config(state.groups.dp_cp.size()), use_distributed_optimizer=False), state)
        stream = BatchStream(data, state, plan=config.batch_plan, micro_batch=config.train.micro_batch, seed=config.seed)
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        losses = forward_backward(config, wrapped, stream.step(at_step), stream.micro_batches(at_step), state).read()
        parameters = _shards(chunks, state)
        with torch.no_grad():
            for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
                parameter.data = parameter.main_grad.clone()
        return losses, parameters, _shards(chunks, state)


def mixers_left(words: list[str]) -> int:
    """How many mixers this process still has after a step's losses and gradients."""
    losses_and_gradients(words)
    gc.collect()
    return sum(isinstance(thing, Mixer) for thing in gc.get_objects())


def _shards(chunks, state) -> list[tuple]:
    tree = [chunk.sharded_state_dict(metadata=sharding_metadata(state.groups.dp_cp)) for chunk in chunks]
    apply_factories(tree)
    return [
        (t.key, tuple(t.global_shape), tuple(t.global_offset), t.data.detach().float().cpu().clone().numpy()) for t in sharded_tensors(tree)
    ]


def assemble(shards_of_ranks: list[list[tuple]]) -> dict[str, torch.Tensor]:
    """Whole tensors from all ranks' shards. Shards that several ranks hold must agree."""
    whole: dict[str, torch.Tensor] = {}
    for shards in shards_of_ranks:
        for name, shape, offset, data in shards:
            tensor = whole.setdefault(name, torch.full(shape, float("nan"), dtype=torch.float64))
            here = tensor[tuple(slice(o, o + n) for o, n in zip(offset, data.shape))]
            data = torch.from_numpy(data).double()
            known = ~here.isnan()
            scale = max(float(data.norm()), 1e-12)
            assert float((here - data)[known].norm()) <= 1e-6 * scale, f"ranks disagree about {name}"
            here.copy_(data)
    assert all(not tensor.isnan().any() for tensor in whole.values()), "a part of some tensor is on no rank"
    return whole


def run_folder_metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
