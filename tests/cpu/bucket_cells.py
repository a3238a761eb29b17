"""What runs inside the ranks of tests of gradient buckets: other cells, with buckets so small that a tiny model has many."""

import contextlib
import dataclasses
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

from hybrid_megatron.config.megatron import ddp_config
from hybrid_megatron.training import build
from hybrid_megatron.training.step import forward_backward
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from tests.cpu import checkpoint_cells

SMALL = 512


@contextlib.contextmanager
def bucket_size(elements: int | None) -> Iterator[None]:
    """None: gradients are reduced after the backward pass, in one bucket a buffer."""

    def sized(ranks: int):
        return dataclasses.replace(ddp_config(ranks), bucket_size=elements, overlap_grad_reduce=elements is not None)

    with unittest.mock.patch.object(build, "ddp_config", sized):
        yield


def with_buckets(elements: int | None, cell: Callable, *arguments: Any) -> Any:
    with bucket_size(elements):
        return cell(*arguments)


def reductions(words: list[str]) -> tuple[tuple[int, int], list[list[str]], list[list[int]]]:
    """(Pipeline and tensor rank; and of each chunk in the third step: its parameters in the order in which their gradients were ready;
    its buckets in the order in which the backward pass had them reduced)."""
    plain_ready, plain_start = _ParamAndGradBucketGroup.register_grad_ready, _ParamAndGradBucketGroup.start_grad_sync
    with bucket_size(SMALL), checkpoint_cells._trainer(words) as (config, state, trainer):
        names = [{parameter: name for name, parameter in chunk.module.named_parameters()} for chunk in trainer.model]
        places = {id(group): (n, k) for n, chunk in enumerate(trainer.model) for k, group in enumerate(chunk.bucket_groups)}
        ready, reduced = ([[] for _ in trainer.model] for _ in range(2))

        def register_grad_ready(group, parameter, *more):
            chunk, _ = places[id(group)]
            if group.is_last_microbatch:
                ready[chunk].append(names[chunk][parameter])
            plain_ready(group, parameter, *more)

        def start_grad_sync(group, *more, **named):
            chunk, number = places[id(group)]
            reduced[chunk].append(number)
            plain_start(group, *more, **named)

        for number in range(2):
            checkpoint_cells._step(config, trainer, number)
        for chunk in trainer.model:
            chunk.zero_grad_buffer()
        with (
            unittest.mock.patch.object(_ParamAndGradBucketGroup, "register_grad_ready", register_grad_ready),
            unittest.mock.patch.object(_ParamAndGradBucketGroup, "start_grad_sync", start_grad_sync),
        ):
            stream = trainer.train_stream
            forward_backward(config, trainer.model, stream.step(2), stream.micro_batches(2), state)
        assert [sorted(each) for each in ready] == [sorted(each.values()) for each in names], "each parameter has one gradient"
        assert [sorted(each) for each in reduced] == [list(range(len(chunk.bucket_groups))) for chunk in trainer.model], "once each"
        return (state.groups.pp.rank(), state.groups.tp.rank()), ready, reduced
