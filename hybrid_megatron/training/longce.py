"""LongCE in a training step: the losses of tokens that see a short context, by the model of this step. What they are for: ops/longce.py.

The short contexts of all micro-batches pass through the model before the first of them is trained on: a pipeline of several stages runs one
schedule at a time. A rank computes those of its own samples, each window cut over context ranks as a sample is, as many windows at once as
have about the tokens of a micro-batch. The output layer sees the scored positions alone.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from hybrid_megatron import platform
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.data import Batch
from hybrid_megatron.model.hybrid_model import TokenLoss
from hybrid_megatron.ops.longce import Windows
from hybrid_megatron.parallel import ParallelState, SequenceLayout
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func


def short_losses(config: RunConfig, model: list[DistributedDataParallel], batches: list[Batch], state: ParallelState) -> list[Tensor]:
    """For each micro-batch [b, s]: its tokens' cross entropy with a short context, in nats, infinite where none is shorter than their own.

    Without gradient; collective. `model` is this rank's chunks; on a stage that is not the last all losses are infinite.
    """
    windows = Windows(config.train.context, config.longce.window, config.longce.stride)
    samples = sum(len(batch.tokens) for batch in batches)
    total = windows.count * samples
    if total == 0:
        whole = _nothing(samples, windows)
    else:
        passes = _passes(total, config.train.micro_batch * windows.context // windows.length, state.micro_batch_group)
        scored = (_layout(windows, state).positions(platform.device()) >= windows.window).nonzero().flatten()
        found = _forward(model, _window_batches(batches, windows, scored, passes, state), scored, windows)
        whole = _joined(found[:total], scored, windows, state) if state.is_last_stage else _nothing(samples, windows)
    parts = whole.split([len(batch.tokens) for batch in batches])
    return [batch.layout.local(part) for batch, part in zip(batches, parts)]


def _nothing(samples: int, windows: Windows) -> Tensor:
    return torch.full((samples, windows.context), torch.inf, device=platform.device())


def _layout(windows: Windows, state: ParallelState, starts: Tensor | None = None) -> SequenceLayout:
    return SequenceLayout(windows.length, state.context, state.context_rank, starts)


def _passes(total: int, at_once: int, multiple: int) -> int:
    """Passes for `total` windows, at most `at_once` in each if that is 1 or more, in the multiple that the schedule asks for."""
    passes = -(-total // max(1, at_once))
    return -(-passes // multiple) * multiple


def _window_batches(batches: list[Batch], windows: Windows, scored: Tensor, passes: int, state: ParallelState) -> list[Batch]:
    """All windows of the micro-batches in order, as many in each pass; the first ones again fill up the last pass."""

    def cut(local: list[Tensor]) -> Tensor:
        return torch.cat([windows.cut(batch.layout.whole(x, state.groups.cp)) for batch, x in zip(batches, local)])

    tokens, targets = cut([batch.tokens for batch in batches]), cut([batch.targets for batch in batches])
    starts = None
    if batches[0].layout.document_starts is not None:
        starts = torch.cat([windows.cut_documents(batch.layout.document_starts) for batch in batches])
    at_once = -(-len(tokens) // passes)
    weights = torch.ones(at_once, len(scored), device=tokens.device)
    cut_batches = []
    for rows in (torch.arange(passes * at_once, device=tokens.device) % len(tokens)).split(at_once):
        layout = _layout(windows, state, None if starts is None else starts[rows])
        cut_batches.append(Batch(layout.local(tokens[rows]), layout.local(targets[rows])[:, scored], weights, layout))
    return cut_batches


def _forward(model: list[DistributedDataParallel], batches: list[Batch], scored: Tensor, windows: Windows) -> Tensor | None:
    """[windows, n] losses of this rank's n scored positions of each window; None on a stage that is not the last."""
    found = []

    def forward(batches: Iterator[Batch], chunk):
        batch = next(batches)
        output = chunk(batch.tokens, batch.targets, batch.weights, batch.layout, scored=scored)
        if not isinstance(output, TokenLoss):
            return output, None
        found.append(output.per_token)
        return output.weighted_sum, lambda total: (total, batch.weights.sum().int(), {})

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(batches) for _ in model],
        model=model,
        num_microbatches=len(batches),
        seq_length=windows.length,
        micro_batch_size=len(batches[0].tokens),
        forward_only=True,
    )
    return torch.cat(found) if found else None


def _joined(found: Tensor, scored: Tensor, windows: Windows, state: ParallelState) -> Tensor:
    """Losses [windows, n] of every context rank's scored positions -> [samples, context]."""
    layout = _layout(windows, state)
    local = found.new_zeros(len(found), layout.local_length)
    local[:, scored] = found
    return windows.join(layout.whole(local, state.groups.cp)[:, windows.window :])
