"""What runs inside the ranks of the tests of single operations: results of one rank, as tensors on the CPU."""

from contextlib import nullcontext
from unittest.mock import patch

import torch
from torch import Tensor

from hybrid_megatron.config import load_recipe
from hybrid_megatron.config.megatron import sharding_metadata, transformer_config
from hybrid_megatron.config.schema import ParallelConfig
from hybrid_megatron.model import embedding as embedding_module
from hybrid_megatron.model.attention.causal import causal_attention
from hybrid_megatron.model.embedding import Embedding
from hybrid_megatron.model.hybrid_model import build_model
from hybrid_megatron.model.initialize import sharded_tensors
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.ops import linear_cross_entropy as linear_cross_entropy_module
from hybrid_megatron.ops import state_passing
from hybrid_megatron.ops.embedding import embed
from hybrid_megatron.ops.head_exchange import recurrence_over_heads
from hybrid_megatron.ops.linear_cross_entropy import linear_cross_entropy
from hybrid_megatron.ops.recurrence import Recurrence
from hybrid_megatron.ops.state_passing import recurrence_over_ranks
from hybrid_megatron.ops.token_shift import shifted_projections
from hybrid_megatron.parallel import SequenceLayout, start
from hybrid_megatron.parallel.all_to_all import heads_from_sequence, sequence_from_heads
from hybrid_megatron.planning.layout import Layout
from hybrid_megatron.planning.memory import mixer_bytes
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from tests.cpu import cells
from tests.cpu.kept import bytes_kept


def cross_entropy_over_ranks(
    size: int, hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, chunk_elements: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(sum, losses, this rank's share of the gradient of hidden, gradient of its rows of weight), the vocabulary cut over all ranks."""
    with start(ParallelConfig(tensor=size), 0) as state, patch.object(linear_cross_entropy_module, "CHUNK_ELEMENTS", chunk_elements):
        rows = weight.chunk(size)[state.groups.tp.rank()].clone().requires_grad_()
        hidden = hidden.clone().requires_grad_()
        total, losses = linear_cross_entropy(hidden, rows, targets, token_weights, state.groups.tp)
        total.backward()
        return total.detach(), losses, hidden.grad, rows.grad


def embedding_and_megatrons(words: list[str], tokens: Tensor) -> list[tuple]:
    """Of this rank, for our embedding and then megatron-core's, with one weight: output, gradient of the weight, attributes of the weight,
    and (name, whole shape, offset) of what a checkpoint holds."""
    run, answers = load_recipe(words), []
    with start(run.parallel, 0) as state:
        config, vocabulary = transformer_config(run), run.model.vocab_size
        whole = torch.randn(vocabulary, config.hidden_size, generator=torch.Generator().manual_seed(0))
        theirs = LanguageModelEmbedding(config, vocabulary, tokens.shape[1], position_embedding_type="none", tp_group=state.groups.tp)
        for module, more in ((Embedding(config, vocabulary, state.groups.tp), ()), (theirs, (None,))):
            weight = module.word_embeddings.weight
            weight.data.copy_(whole.chunk(state.groups.tp.size())[state.groups.tp.rank()])
            out = module(tokens, *more)
            (out * torch.arange(1.0, out.numel() + 1).view(out.shape).sin()).sum().backward()
            shards = sharded_tensors(module.sharded_state_dict("embedding.", metadata=sharding_metadata(state.groups.dp_cp)))
            held = [(shard.key, tuple(shard.global_shape), tuple(shard.global_offset)) for shard in shards]
            answers.append((out.detach(), weight.grad, vars(weight), held))
    return answers


def gradient_of_embedding(words: list[str], dense: bool) -> list[tuple]:
    """This rank's shard of it after a step; `dense`: made as a gradient of its own for each micro-batch."""
    with patch.object(embedding_module, "embed", lambda *inputs: embed(*inputs[:3])) if dense else nullcontext():
        return [shard for shard in cells.loss_and_gradients(words)[2] if shard[0] == "embedding.word_embeddings.weight"]


def kept_over_ranks(words: list[str]) -> tuple[int, int]:
    """(bytes that the first layer's mixing keeps for its backward pass on this rank, what the plan says), the weights aside."""
    config = load_recipe(words)
    plan = plan_layers(config)
    with start(config.parallel, 0) as state:
        model = build_model(config, plan, state)
        mixing = model.decoder.layers[0].self_attention
        layout = SequenceLayout(config.train.context, config.parallel.context, state.context_rank)
        hidden = torch.randn(layout.local_length, config.train.micro_batch, config.model.hidden_size, requires_grad=True)
        weight = mixing.order.computed_rows(1) * config.model.hidden_size * 4  # the input projection's, in block order
        planned = mixer_bytes(Layout(config, plan, config.parallel.context), plan.layers[0])
        return bytes_kept(mixing, hidden, layout, model) - weight, planned


def mixing_over_ranks(
    size: int,
    kind: str,
    inputs: list[Tensor],
    weights: Tensor,
    starts: Tensor | None,
    scale: float,
    recurrence: Recurrence | None = None,
    pieces: int = 1,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(local positions, local output, gradients of the local inputs) with the sequence cut over all ranks: of "attention", or of a
    recurrence by passing "states", chunks cut into so many pieces, or by exchanging "heads"."""
    with start(ParallelConfig(context=size), 0) as state, patch.object(state_passing, "pieces_of_a_chunk", lambda *_: pieces):
        layout = SequenceLayout(inputs[0].shape[1], size, state.context_rank, starts)
        leaves = [layout.local(x).clone().requires_grad_() for x in inputs]
        if kind == "attention":
            o = causal_attention(*leaves, layout, scale, state.groups.cp)
        else:
            over = {"states": recurrence_over_ranks, "heads": recurrence_over_heads}[kind]
            o = over(recurrence, tuple(leaves), scale, layout, state.groups.cp)
        (o * layout.local(weights)).sum().backward()
        return layout.positions("cpu"), o.detach(), [x.grad for x in leaves]


def shift_over_ranks(
    size: int, tensors: list[Tensor], sums: list[Tensor], starts: Tensor | None
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """(local positions, local outputs of the token shift, gradients of the local x, of mixes and matrices) over `size` context ranks."""
    with start(ParallelConfig(context=size), 0) as state:
        x, *rest = tensors
        layout = SequenceLayout(x.shape[1], size, state.context_rank, starts)
        leaves = [tensor.clone().requires_grad_() for tensor in (layout.local(x), *rest)]
        outputs = shifted_projections(leaves[0], leaves[1], tuple(leaves[2:]), layout, state.groups.cp)
        sum((y * layout.local(w)).sum() for y, w in zip(outputs, sums)).backward()
        return layout.positions("cpu"), [y.detach() for y in outputs], [leaf.grad for leaf in leaves]


def exchange_of_heads(size: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(this rank's heads of the whole sequence, back again, gradient of the sum of 1.5 heads^2, the local x)."""
    with start(ParallelConfig(context=size), 0) as state:
        layout = SequenceLayout(x.shape[1], size, state.context_rank)
        local = layout.local(x).clone().requires_grad_()
        heads = heads_from_sequence(local, layout, state.groups.cp)
        back = sequence_from_heads(heads, layout, state.groups.cp)
        (1.5 * heads.square()).sum().backward()
        return heads.detach(), back.detach(), local.grad, local.detach()


def initial_parameters(words: list[str]) -> list[tuple]:
    """This rank's shards of the fresh model's parameters as (name, whole shape, offset, array)."""
    config = load_recipe(words)
    with start(config.parallel, config.seed) as state:
        tree = build_model(config, plan_layers(config), state).sharded_state_dict(metadata=sharding_metadata(state.groups.dp_cp))
        apply_factories(tree)
        return [(t.key, tuple(t.global_shape), tuple(t.global_offset), t.data.detach().float().numpy()) for t in sharded_tensors(tree)]
