"""One optimizer step, and one pass over the validation samples, through megatron-core's pipeline schedule."""

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hybrid_megatron import platform
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.data import Batch, BatchStream
from hybrid_megatron.model.hybrid_model import TokenLoss
from hybrid_megatron.parallel import ParallelState
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func


class NonFinite(Exception):
    """The loss or the gradient norm of a step is NaN or infinite; the parameters are those from before the step."""


@dataclass(frozen=True)
class StepResult:
    loss: float
    """What is optimised, in nats a token."""
    lm_loss: float
    """Plain cross entropy, in nats a token."""
    grad_norm: float
    """Global gradient norm before clipping."""
    data_seconds: float
    """Time this rank waited for its samples."""


class _Timed:
    """Iterates, and adds up the time that waiting for the next item took."""

    def __init__(self, batches: Iterator[Batch]):
        self.batches, self.seconds = batches, 0.0

    def __iter__(self):
        return self

    def __next__(self) -> Batch:
        began = time.perf_counter()
        try:
            return next(self.batches)
        finally:
            self.seconds += time.perf_counter() - began


def train_step(
    config: RunConfig,
    model: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    stream: BatchStream,
    step: int,
    state: ParallelState,
) -> StepResult:
    """Forward and backward over the step's micro-batches, reduce, clip, update. Raises NonFinite before any parameter changes."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    batches = _Timed(stream.step(step))
    loss, lm_loss, _ = _run_schedule(config, model, batches, stream.micro_batches(step), state, forward_only=False)
    if not math.isfinite(loss):
        raise NonFinite(f"the loss is {loss}")

    optimizer.prepare_grads()
    grad_norm = gradient_norm(optimizer)
    if not math.isfinite(grad_norm):
        raise NonFinite(f"the gradient norm is {grad_norm} at a loss of {loss:.4f}")
    clip_grad_by_total_norm_fp32(optimizer.get_parameters(), max_norm=config.optimizer.clip_grad, total_norm=grad_norm)
    optimizer.step_with_ready_grads()
    return StepResult(loss, lm_loss, grad_norm, batches.seconds)


def gradient_norm(optimizer: MegatronOptimizer) -> float:
    """Global norm of the reduced gradients, summed in float64; collective.

    megatron-core's own, without Apex or TE, is torch.norm in float32, which on a CPU is off by 1e-5 over a million elements: two layouts,
    one with a matrix whole and one with its halves, then clip differently.
    """
    total = torch.zeros((), dtype=torch.float64, device=platform.device())
    for part in optimizer.chained_optimizers:
        for gradient in part.get_grads_for_grad_norm():
            total += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    torch.distributed.all_reduce(total, group=optimizer.get_grad_stats_parallel_group())
    return math.sqrt(total.item())


def validation_loss(config: RunConfig, model: list[DistributedDataParallel], stream: BatchStream, state: ParallelState) -> float:
    """Mean cross entropy, nats a token, over the first `validation.samples` samples."""
    count = min(config.validation.samples, len(stream.dataset))
    batches = list(stream.first_samples(count))
    for chunk in model:
        chunk.eval()
    with torch.no_grad():
        _, lm_loss, tokens = _run_schedule(config, model, iter(batches), len(batches), state, forward_only=True)
    for chunk in model:
        chunk.train()
    assert tokens == count * config.train.context, f"{tokens} tokens measured in {count} samples"
    return lm_loss


def _run_schedule(
    config: RunConfig,
    model: list[DistributedDataParallel],
    batches: Iterator[Batch],
    count: int,
    state: ParallelState,
    *,
    forward_only: bool,
) -> tuple[float, float, int]:
    """(weighted loss, plain loss, tokens) over all ranks and micro-batches; gradients are left reduced in the model's buffers."""

    def forward(batches: Iterator[Batch], model):
        batch = next(batches)
        output = model(batch.tokens, batch.targets, batch.weights, batch.layout)
        return (output.weighted_sum if isinstance(output, TokenLoss) else output), lambda total: _reported(total, output, batch)

    reports = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=list(itertools.tee(batches, len(model))),  # each chunk passes over all micro-batches
        model=model,
        num_microbatches=count,
        seq_length=config.train.context,
        micro_batch_size=config.train.micro_batch,
        forward_only=forward_only,
    )
    sums = torch.zeros(3, dtype=torch.float64, device=platform.device())
    for report in reports:
        sums += report["sums"]
    loss, lm_loss, tokens = state.sum_over_samples(sums).tolist()
    return loss / tokens, lm_loss / tokens, int(tokens)


def _reported(total: torch.Tensor, output: TokenLoss, batch: Batch):
    """What the schedule asks of a loss function: (sum to differentiate, tokens to divide by, what to report)."""
    counted = batch.weights > 0
    tokens = counted.sum()
    plain = (output.per_token.double() * counted).sum()
    return total, tokens.int(), {"sums": torch.stack((total.detach().double(), plain, tokens.double()))}
