"""The cross entropy of a model on held-out tokens, summed for each position of a sample in float64; over any layout."""

import itertools
from dataclasses import dataclass

import torch

from hybrid_megatron import platform
from hybrid_megatron.evaluation.held_out import HeldOut
from hybrid_megatron.model.hybrid_model import HybridModel, TokenLoss
from hybrid_megatron.parallel import ParallelState
from megatron.core.pipeline_parallel import get_forward_backward_func


@dataclass(frozen=True)
class LossByPosition:
    """Sums over the samples of one length."""

    sums: torch.Tensor
    """[length] float64 nats: of the tokens predicted at each position (position 0 has seen one token)."""
    tokens: torch.Tensor
    """[length] float64: how many these are."""

    @property
    def length(self) -> int:
        return len(self.sums)

    @property
    def samples(self) -> int:
        return int(self.tokens[0])

    @property
    def total(self) -> int:
        """Tokens predicted."""
        return int(self.tokens.sum())

    @property
    def loss(self) -> float:
        """Mean over all tokens, nats."""
        return float(self.sums.sum() / self.tokens.sum())

    @property
    def perplexity(self) -> float:
        return float(torch.tensor(self.loss, dtype=torch.float64).exp())

    def buckets(self) -> tuple[list[int], list[float], list[int]]:
        """Edges, and between each two of them the mean loss and the number of tokens."""
        edges = bucket_edges(self.length)
        sizes = [end - begin for begin, end in itertools.pairwise(edges)]
        sums, tokens = (torch.stack([part.sum() for part in values.split(sizes)]) for values in (self.sums, self.tokens))
        return edges, (sums / tokens).tolist(), tokens.long().tolist()


def bucket_edges(length: int) -> list[int]:
    """Positions 0 to 15 one by one, then every octave [2^k, 2^(k + 1)) in eight equal parts, up to `length`."""
    edges = list(range(16))
    octaves = range(4, max(length.bit_length(), 4))
    edges += [part * 2 ** (k - 3) for k in octaves for part in range(8, 16)]
    return [edge for edge in edges if edge < length] + [length]


def measure(model: list[HybridModel], data: HeldOut, length: int, micro_batch: int, state: ParallelState) -> LossByPosition:
    """Loss by position over all samples of `length` tokens, `micro_batch` of them at once; collective. `model` is this rank's chunks."""
    sums = torch.zeros(2, length, dtype=torch.float64, device=platform.device())

    def forward(batches, chunk):
        batch = next(batches)
        output = chunk(batch.tokens, batch.targets, batch.weights, batch.layout)
        if not isinstance(output, TokenLoss):
            return output, None  # a stage that is not the last
        values = torch.stack((output.per_token.double() * batch.weights, batch.weights.double()))
        sums.index_add_(1, batch.layout.positions(sums.device), values.sum(1))
        return output.weighted_sum, lambda total: (total, batch.weights.sum().int(), {})

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[data.batches(length, micro_batch, state) for _ in model],
            model=model,
            num_microbatches=data.micro_batches(length, micro_batch, state),
            seq_length=length,
            micro_batch_size=micro_batch,
            forward_only=True,
        )
    return LossByPosition(*state.sum_over_samples(sums).cpu())
