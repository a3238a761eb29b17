"""What runs inside the ranks of the tests of halos, windows, exchanges of heads and convolutions: one rank's results, on the CPU."""

from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_megatron.config.schema import ParallelConfig
from hybrid_megatron.model.attention.causal import causal_attention
from hybrid_megatron.model.attention.windowed import windowed_attention
from hybrid_megatron.ops.short_convolution import short_convolution
from hybrid_megatron.parallel import SequenceLayout, start
from hybrid_megatron.parallel.halo import preceding_tokens


class Traffic:
    """Records the all-to-alls made while it is open: tokens received from other ranks, and from this one, of each."""

    def __init__(self, rank: int):
        self.rank, self.calls = rank, []

    def __enter__(self) -> "Traffic":
        exchange = dist.all_to_all_single

        def recorded(output: Tensor, sent: Tensor, output_splits: list[int], input_splits: list[int], group) -> None:
            assert (output.shape[0], sent.shape[0]) == (sum(output_splits), sum(input_splits))
            self.calls.append((sum(output_splits) - output_splits[self.rank], output_splits[self.rank] + input_splits[self.rank]))
            exchange(output, sent, output_splits, input_splits, group=group)

        self.patch = patch.object(dist, "all_to_all_single", recorded)
        self.patch.start()
        return self

    def __exit__(self, *_) -> None:
        self.patch.stop()


def halos_over_ranks(size: int, x: Tensor, widths: list[int]) -> list[tuple[tuple[Tensor, ...], Tensor, list[tuple[int, int]]]]:
    """Of each width: the halos, the local gradient of `halo_loss`, and the traffic of the forward pass."""
    with start(ParallelConfig(context=size), 0) as state:
        layout = SequenceLayout(x.shape[1], size, state.context_rank)
        results = []
        for width in widths:
            local = layout.local(x).clone().requires_grad_()
            with Traffic(state.context_rank) as traffic:
                halos = preceding_tokens(local, width, layout, state.groups.cp)
            halo_loss(dict(zip(layout.chunks, halos)), local).backward()
            results.append((tuple(halo.detach() for halo in halos), local.grad, traffic.calls))
        return results


def halo_loss(halos: dict[int, Tensor], x: Tensor) -> Tensor:
    """A sum whose gradient tells the halo of one chunk from another's; x itself takes part once."""
    return torch.sin(x).sum() + sum((chunk + 1) * (halo**3).sum() for chunk, halo in halos.items())


def attention_over_ranks(
    size: int, inputs: list[Tensor], weights: Tensor, starts: Tensor | None, scale: float, cases: list[dict]
) -> tuple[Tensor, list[list[Tensor]]]:
    """Local positions; of each case (a window, or an exchange of full attention) the local output and gradients of q, k and v."""
    with start(ParallelConfig(context=size), 0) as state:
        layout = SequenceLayout(inputs[0].shape[1], size, state.context_rank, starts)
        results = []
        for case in cases:
            leaves = [layout.local(x).clone().requires_grad_() for x in inputs]
            attention = windowed_attention if "window" in case else causal_attention
            o = attention(*leaves, layout, scale=scale, context_group=state.groups.cp, **case)
            (o * layout.local(weights)).sum().backward()
            results.append([o.detach(), *(x.grad for x in leaves)])
        return layout.positions("cpu"), results


def windowed_traffic(size: int, inputs: list[Tensor], window: int) -> list[tuple[int, int]]:
    with start(ParallelConfig(context=size), 0) as state:
        layout = SequenceLayout(inputs[0].shape[1], size, state.context_rank)
        with Traffic(state.context_rank) as traffic:
            windowed_attention(*(layout.local(x) for x in inputs), layout, window, 1.0, state.groups.cp)
        return traffic.calls


def convolution_over_ranks(
    size: int, x: Tensor, taps: list[Tensor], weights: Tensor, starts: Tensor | None
) -> tuple[Tensor, list[list[Tensor]]]:
    """Local positions; for each of the taps the local output, the gradient of x and this rank's share of that of the taps."""
    with start(ParallelConfig(context=size), 0) as state:
        layout = SequenceLayout(x.shape[1], size, state.context_rank, starts)
        results = []
        for weight in taps:
            local, weight = layout.local(x).clone().requires_grad_(), weight.clone().requires_grad_()
            y = short_convolution(local, weight, layout, state.groups.cp)
            (y * layout.local(weights)).sum().backward()
            results.append([y.detach(), local.grad, weight.grad])
        return layout.positions("cpu"), results
