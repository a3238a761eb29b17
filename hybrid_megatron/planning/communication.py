"""Bytes that a GPU sends in one optimizer step, by kind, of the pipeline stage that sends most; ring algorithms, where it receives as many.

Letters as in memory.py. An all-gather or reduce-scatter of B bytes over n ranks sends (n - 1) / n B, an all-reduce twice that.
"""

from hybrid_megatron.model.mixers import MIXERS
from hybrid_megatron.model.pattern import Layer
from hybrid_megatron.model.unit_order import UnitOrder
from hybrid_megatron.planning.layout import Layout
from hybrid_megatron.planning.memory import rank_params


def communication(layout: Layout) -> dict[str, float]:
    """gradients: reduce-scatter, 4 P over data and context ranks. parameters: all-gather after the update, e P.
    tensor, context, pipeline: see below. The kinds may come from different stages."""
    stages = range(layout.config.parallel.pipeline)
    kinds = {"gradients": _gradients, "parameters": _parameters, "tensor": _tensor, "context": _context, "pipeline": _pipeline}
    return {name: max(of(layout, stage) for stage in stages) for name, of in kinds.items()}


def _over(ranks: int) -> float:
    return (ranks - 1) / ranks


def _gradients(layout: Layout, stage: int) -> float:
    return _over(layout.shards) * 4 * rank_params(layout, stage).total


def _parameters(layout: Layout, stage: int) -> float:
    params = rank_params(layout, stage)
    return _over(layout.shards) * (layout.element * params.usual + 4 * params.float32)


def _tensor(layout: Layout, stage: int) -> float:
    """Collectives of a micro-batch, each of h t e bytes.

    Without sequence parallelism all-reduces: two a layer in the forward pass (after the mixers, after the SwiGLU block), two in the
    backward pass, one each for the embedding and the gradient of the hidden states. With it all-gathers and reduce-scatters: four a layer
    in the forward pass; in the backward pass six, two of which gather the inputs of projections again; two each for the embedding and the
    hidden states before the loss. Layers or blocks that are recomputed do their forward pass again.
    """
    config = layout.config
    sequence = config.parallel.sequence
    count = sum(_collectives(layout, layer) for chunk in layout.chunks(stage) for layer in chunk)
    ends = (stage == 0) + (stage == config.parallel.pipeline - 1)
    count += ends * (2 if sequence else 1)
    whole = config.model.hidden_size * layout.local_tokens * layout.element
    return count * (1 if sequence else 2) * _over(config.parallel.tensor) * whole * layout.micro_batches


def _collectives(layout: Layout, layer: Layer) -> int:
    """Of a layer, forward and backward. Where mixers project the layer's input themselves, it is gathered for them, and its gradient
    summed, beside that of the input projection or, if there is none, in its place; it is kept, so nothing gathers it again."""
    sequence, recompute = layout.config.parallel.sequence, layout.config.train.recompute
    takes = any(MIXERS[group.mixer].takes_input for group in layer.groups)
    beside = takes and UnitOrder(layout.config.model, layer.groups).rows > 0
    forward = 4 + beside if sequence else 2
    backward = 6 + beside - (takes and not beside) if sequence else 2 + beside
    again = {"none": 0, "selective": 2 if sequence else 1, "full": forward}[recompute]
    return forward + again + backward


def _context(layout: Layout, stage: int) -> float:
    """The mixers' `context_bytes`, of the busiest rank, twice where layers are recomputed, and their `context_backward_bytes`."""
    config = layout.config
    if config.parallel.context == 1:
        return 0.0
    arguments = (config.train.context, config.parallel, layout.element)
    groups = [group for chunk in layout.chunks(stage) for layer in chunk for group in layer.groups]
    forward = sum(MIXERS[group.mixer].context_bytes(config.model, group, *arguments) for group in groups)
    backward = sum(MIXERS[group.mixer].context_backward_bytes(config.model, group, *arguments) for group in groups)
    sample = (2 if config.train.recompute == "full" else 1) * forward + backward
    return sample * config.train.micro_batch * layout.micro_batches


def _pipeline(layout: Layout, stage: int) -> float:
    """h t e / S for each border between two chunks: forward to the next stage, gradients to the one before."""
    stages, chunks = layout.config.parallel.pipeline, layout.config.parallel.virtual_pipeline
    if stages == 1:
        return 0.0
    borders = 2 * chunks - (stage == 0) - (stage == stages - 1)
    border = layout.config.model.hidden_size * layout.local_tokens * layout.element / layout.residual_share
    return borders * border * layout.micro_batches
