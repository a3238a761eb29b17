"""Samples -> batches. A batch is a pure function of the step, so a resumed run sees exactly what an uninterrupted one would."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from hybrid_megatron import platform
from hybrid_megatron.config.batch_plan import BatchPlan
from hybrid_megatron.data.datasets import Dataset
from hybrid_megatron.parallel import ParallelState, SequenceLayout


@dataclass(frozen=True)
class Batch:
    """One micro-batch on this rank: its tokens of `micro_batch` samples."""

    tokens: Tensor
    """[b, s] int64, s the local length."""
    targets: Tensor
    """[b, s] int64, the token that follows each."""
    weights: Tensor
    """[b, s] float32 weight of each token in the loss; 0 where a sample only fills up a batch."""
    layout: SequenceLayout


class BatchStream:
    """Cuts steps into micro-batches for this rank.

    Sample i of a run is sample i mod n of the dataset in epoch i div n. The dataset's own maps shuffle documents and samples; every later
    epoch shuffles the samples anew, seeded by the run's seed and the epoch.
    """

    def __init__(self, dataset: Dataset, state: ParallelState, *, plan: BatchPlan, micro_batch: int, seed: int):
        self.dataset, self.state, self.seed = dataset, state, seed
        self.plan, self.micro_batch = plan, micro_batch

    def micro_batches(self, step: int) -> int:
        """Micro-batches of training step `step` on this rank."""
        return len(self.plan.samples(step)) // (self.micro_batch * self.state.data)

    def step(self, step: int) -> Iterator[Batch]:
        """The micro-batches of training step `step` (0-based) on this rank."""
        samples = self.plan.samples(step)
        yield from self._cut(samples.start, samples.stop)

    def first_samples(self, count: int) -> Iterator[Batch]:
        """The first `count` samples of the dataset, for validation, filled up with samples of weight 0 to whole micro-batches."""
        whole = self.micro_batch * self.state.data * self.state.micro_batch_group
        yield from self._cut(0, -(-count // whole) * whole, real=count)

    def _cut(self, first: int, end: int, real: int | None = None) -> Iterator[Batch]:
        share = (end - first) // self.state.data  # of consecutive samples; which rank computes a sample changes no sum
        mine = first + self.state.data_rank * share
        for at in range(mine, mine + share, self.micro_batch):
            yield self._batch(range(at, at + self.micro_batch), real)

    def _batch(self, indices: range, real: int | None) -> Batch:
        samples = [self._sample(i) for i in indices]
        tokens, targets = (torch.stack([sample[key] for sample in samples]) for key in ("tokens", "labels"))
        starts = None
        if "cu_seqlens" in samples[0]:
            context = tokens.shape[1]
            starts = torch.zeros(len(samples), context + 1, dtype=torch.bool)  # the column past the end takes the padding of cu_seqlens
            for row, sample in zip(starts, samples):
                row[sample["cu_seqlens"].long()] = True
            starts = _on_device(starts[:, :context])
        layout = SequenceLayout(tokens.shape[1], self.state.context, self.state.context_rank, starts)
        weights = torch.ones(tokens.shape)
        if real is not None:
            weights[[i for i, index in enumerate(indices) if index >= real]] = 0
        return Batch(*(_on_device(layout.local(x)) for x in (tokens, targets, weights)), layout)

    def _sample(self, index: int) -> dict[str, Tensor]:
        epoch, place = divmod(index, len(self.dataset))
        if epoch > 0:
            place = int(_order_of_epoch(len(self.dataset), self.seed, epoch)[place])
        return self.dataset[place]


def _on_device(x: Tensor) -> Tensor:
    """From page-locked memory: else the host waits until the device has done all it was asked to before."""
    if not platform.is_cuda():
        return x.contiguous()
    return x.contiguous().pin_memory().to(platform.device(), non_blocking=True)


@lru_cache(maxsize=2)
def _order_of_epoch(length: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(length)
