"""Counts what a rank receives from others while something runs, for the tests of the accounts of communication."""

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import torch.distributed as dist

from hybrid_megatron.config import load_recipe
from hybrid_megatron.data import BatchStream, open_dataset
from hybrid_megatron.model.hybrid_model import build_model
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.parallel import start
from megatron.core.tensor_parallel import mappings


class Traffic:
    received = 0
    """Bytes from other ranks."""


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """All-gathers and reduce-scatters of megatron-core's mappings, and every all-to-all."""
    traffic = Traffic()
    gather, scatter, exchange = mappings.dist_all_gather_func, mappings.dist_reduce_scatter_func, dist.all_to_all_single

    def counted_gather(output, input, *args, **more):
        traffic.received += (output.numel() - input.numel()) * output.element_size()
        return gather(output, input, *args, **more)

    def counted_scatter(output, input, *args, **more):
        traffic.received += (input.numel() - output.numel()) * output.element_size()
        return scatter(output, input, *args, **more)

    def counted_exchange(output, input, output_split_sizes=None, input_split_sizes=None, group=None, **more):
        splits = output_split_sizes or [output.shape[0] // group.size()] * group.size()
        row = output[:1].numel() if output.shape[0] else 0
        traffic.received += (sum(splits) - splits[group.rank()]) * row * output.element_size()
        return exchange(output, input, output_split_sizes, input_split_sizes, group=group, **more)

    with (
        patch.object(mappings, "dist_all_gather_func", counted_gather),
        patch.object(mappings, "dist_reduce_scatter_func", counted_scatter),
        patch.object(dist, "all_to_all_single", counted_exchange),
    ):
        yield traffic


def received(words: list[str]) -> tuple[int, int]:
    """Bytes that this rank receives from other ranks in the forward pass of one micro-batch, and in the backward pass."""
    config = load_recipe(words)
    with start(config.parallel, config.seed) as state:
        model = build_model(config, plan_layers(config), state)
        data = open_dataset(config, "train")
        stream = BatchStream(data, state, plan=config.batch_plan, micro_batch=config.train.micro_batch, seed=config.seed)
        batch = next(stream.step(0))
        with counted() as forward:
            output = model(batch.tokens, batch.targets, batch.weights, batch.layout)
        with counted() as backward:
            output.weighted_sum.backward()
        return forward.received, backward.received
