"""One optimizer step, and one pass over the validation samples, through megatron-core's pipeline schedule."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from hybrid_megatron import platform
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.data import Batch, BatchStream
from hybrid_megatron.model.hybrid_model import TokenLoss
from hybrid_megatron.ops.longce import longce_weights
from hybrid_megatron.parallel import ParallelState
from hybrid_megatron.training.longce import short_losses
from hybrid_megatron.training.optimizer import clip_next_step
from hybrid_megatron.training.stability import Decision
from hybrid_megatron.training.watchdog import UNWATCHED, Watch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func


@dataclass(frozen=True)
class Losses:
    """Of one pass over some samples, on all ranks."""

    loss: float
    """What is optimised, in nats a token."""
    lm_loss: float
    """Plain cross entropy, in nats a token."""
    tokens: int
    longce: dict[str, float]
    """LongCE's metrics: `longce_mean_weight` over all tokens; `longce_at_gamma`, the share at the largest weight of the tokens behind the
    first `longce.window` of each sample. Empty without LongCE."""


@dataclass(frozen=True)
class LossSums:
    """Of one pass, still on the device: reading them waits until it has computed them, and all before."""

    sums: torch.Tensor
    config: RunConfig

    def read(self) -> Losses:
        return self.read_with(self.sums.new_zeros(()))[0]

    def read_with(self, other: torch.Tensor) -> tuple[Losses, float]:
        """And another number of the device's, so that it is waited for once."""
        loss, lm_loss, tokens, *more, number = torch.cat((self.sums, other.to(self.sums.dtype).view(1))).tolist()
        metrics = {}
        if more:
            late = tokens * (1 - self.config.longce.window / self.config.train.context)
            metrics = {"longce_mean_weight": more[0] / tokens, "longce_at_gamma": more[1] / late}
        return Losses(loss / tokens, lm_loss / tokens, int(tokens), metrics), number


@dataclass(frozen=True)
class StepResult:
    losses: Losses
    grad_norm: float
    """Global gradient norm before clipping."""
    data_seconds: float
    """Time this rank waited for its samples."""
    decision: Decision
    """Whether the update was made."""


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
    judge: Callable[[float, float], Decision],
    watch: Watch = UNWATCHED,
) -> StepResult:
    """Forward and backward over the micro-batches of step `step` (0-based), reduce, clip, and update unless `judge` decides otherwise.

    `judge` is asked with the loss and the gradient norm before clipping, the same on all ranks; where it says no, parameters and
    optimizer state are those from before the step.
    """
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    batches = _Timed(watch.micro_batches(stream.step(step)))
    sums = forward_backward(config, model, batches, stream.micro_batches(step), state)

    watch.phase("optimizer")
    optimizer.prepare_grads()
    losses, squared = sums.read_with(squared_gradient_norm(optimizer))
    grad_norm = math.sqrt(squared)
    decision = judge(losses.loss, grad_norm)
    if decision.update:
        clip_next_step(optimizer, config.optimizer.clip_grad, grad_norm)
        optimizer.step_with_ready_grads()
    return StepResult(losses, grad_norm, batches.seconds, decision)


def forward_backward(
    config: RunConfig, model: list[DistributedDataParallel], batches: Iterator[Batch], count: int, state: ParallelState
) -> LossSums:
    """Losses of `count` micro-batches, in all of which every token counts; gradients are left reduced in the model's buffers."""
    if not config.longce.enabled:
        return _run_schedule(config, model, ((batch, batch.weights) for batch in batches), count, state)
    held = list(batches)
    with _measuring(model):
        short = short_losses(config, model, held, state)
    return _run_schedule(config, model, zip(held, short), count, state, longce=True)


def squared_gradient_norm(optimizer: MegatronOptimizer) -> torch.Tensor:
    """Square of the global norm of the reduced gradients, summed in float64, still on the device; collective.

    megatron-core's own, without Apex or TE, is torch.norm in float32, which on a CPU is off by 1e-5 over a million elements: two layouts,
    one with a matrix whole and one with its halves, then clip differently.
    """
    gradients = [gradient for part in optimizer.chained_optimizers for gradient in part.get_grads_for_grad_norm()]
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float64) if gradients else [torch.zeros((), dtype=torch.float64)]
    total = torch.stack(norms).square().sum().to(platform.device())
    torch.distributed.all_reduce(total, group=optimizer.get_grad_stats_parallel_group())
    return total


def validation_loss(
    config: RunConfig, model: list[DistributedDataParallel], stream: BatchStream, state: ParallelState, watch: Watch = UNWATCHED
) -> float:
    """Mean cross entropy, nats a token, over the first `validation.samples` samples."""
    count = min(config.validation.samples, len(stream.dataset))
    batches = list(stream.first_samples(count))
    with _measuring(model):
        weighted = ((batch, batch.weights) for batch in watch.micro_batches(iter(batches), "validation", "validation"))
        losses = _run_schedule(config, model, weighted, len(batches), state, forward_only=True).read()
    assert losses.tokens == count * config.train.context, f"{losses.tokens} tokens measured in {count} samples"
    return losses.lm_loss


@contextlib.contextmanager
def _measuring(model: list[DistributedDataParallel]) -> Iterator[None]:
    """The model as it is measured: no gradients, nothing kept to be computed again."""
    for chunk in model:
        chunk.eval()
    with torch.no_grad():
        yield
    for chunk in model:
        chunk.train()


def _run_schedule(
    config: RunConfig,
    model: list[DistributedDataParallel],
    batches: Iterable[tuple[Batch, torch.Tensor]],
    count: int,
    state: ParallelState,
    *,
    forward_only: bool = False,
    longce: bool = False,
) -> LossSums:
    """One pass over micro-batches, each with its tokens' weights, or with their short losses for LongCE to make weights of.

    The model is given each token's share in the mean over all tokens, so that what it returns is differentiated as it is.
    """
    weigh = partial(longce_weights, gamma=config.longce.gamma) if longce else None
    tokens = count * config.train.micro_batch * config.train.context * state.data

    def share(short: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        return weigh(short, losses) / tokens

    def forward(batches: Iterator[tuple[Batch, torch.Tensor]], model):
        batch, given = next(batches)
        if longce:
            output = model(batch.tokens, batch.targets, given, batch.layout, weigh=share)
        else:
            output = model(batch.tokens, batch.targets, given / tokens, batch.layout)
        if not isinstance(output, TokenLoss):
            return output, None  # a stage that is not the last
        more = _longce_sums(given, weigh(given, output.per_token), config.longce.gamma) if longce else ()
        return output.weighted_sum, lambda part: _reported(part, tokens, output, batch, more)

    reports = get_forward_backward_func()(
        forward_step_func=forward,
        # Each chunk passes over all micro-batches. tee keeps dozens that have been used: not where there is one chunk.
        data_iterator=[batches] if len(model) == 1 else list(itertools.tee(batches, len(model))),
        model=model,
        num_microbatches=count,
        seq_length=config.train.context,
        micro_batch_size=config.train.micro_batch,
        forward_only=forward_only,
    )
    sums = torch.zeros(5 if longce else 3, dtype=torch.float64, device=platform.device())
    for report in reports:
        sums += report["sums"]
    return LossSums(state.sum_over_samples(sums), config)


def _longce_sums(short: torch.Tensor, weights: torch.Tensor, gamma: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the weights, and how many are the largest of tokens with a short context."""
    return weights.double().sum(), ((weights >= gamma) & short.isfinite()).sum()


def _reported(part: torch.Tensor, tokens: int, output: TokenLoss, batch: Batch, more: tuple[torch.Tensor, ...]):
    """What the schedule asks of a loss function: (what to differentiate, tokens, what to report). `part` is that of the mean over all
    `tokens`."""
    counted = batch.weights > 0
    here, plain = counted.sum(), (output.per_token.double() * counted).sum()
    sums = [part.detach().double() * tokens, plain, here.double(), *(x.double() for x in more)]
    return part, here.int(), {"sums": torch.stack(sums)}
