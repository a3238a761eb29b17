"""The language model: embedding, TransformerBlock over the layer plan, output layer with its loss.

A rank holds one pipeline stage, in one chunk or, under the interleaved schedule, in several.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from hybrid_megatron.config.megatron import transformer_config
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.model.embedding import Embedding
from hybrid_megatron.model.initialize import initialize_parameters
from hybrid_megatron.model.layer_specs import chunk_specs
from hybrid_megatron.model.pattern import LayerPlan
from hybrid_megatron.ops.linear_cross_entropy import linear_cross_entropy
from hybrid_megatron.parallel import ParallelState, SequenceLayout
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig


class TokenLoss(NamedTuple):
    weighted_sum: Tensor
    """Scalar with gradient: sum of token weight times cross entropy over the local tokens."""
    per_token: Tensor
    """[b, s] cross entropy in nats, without gradient; [b, n] if only n positions were scored."""


class HybridModel(MegatronModule):
    """One model chunk: the embedding is in the first chunk of the first stage, the output layer in the last of the last. Build with
    `build_chunks`."""

    def __init__(self, config: TransformerConfig, run: RunConfig, plan: LayerPlan, state: ParallelState, chunk: int):
        super().__init__(config=config)
        groups = state.groups
        self.pre_process = state.is_first_stage and chunk == 0
        self.post_process = state.is_last_stage and chunk == state.virtual_pipeline - 1
        self.model_type = ModelType.encoder_or_decoder  # asked by the pipeline schedule
        self.share_embeddings_and_output_weights = False  # asked by megatron-core's gradient finalisation
        if self.pre_process:
            self.embedding = Embedding(config, run.model.vocab_size, groups.tp)
        self.decoder = TransformerBlock(
            config,
            chunk_specs(config, run, plan, groups.pp.rank(), chunk),
            pre_process=self.pre_process,
            post_process=self.post_process,
            pg_collection=groups,
            vp_stage=chunk,
        )
        if self.post_process:
            self.output_layer = OutputLayer(config, run.model.vocab_size, groups)

    def set_input_tensor(self, input_tensor) -> None:
        """Called by the pipeline schedule with the previous chunk's output."""
        self.decoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        token_weights: Tensor,
        layout: SequenceLayout,
        *,
        scored: Tensor | None = None,
        weigh: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor | TokenLoss:
        """tokens, targets, token_weights [b, s], s the local length. Returns hidden states [s, b, h], or TokenLoss in the last chunk.

        `scored` [n]: the local positions whose loss is wanted; targets and token_weights [b, n] are then those of these positions.
        `weigh` makes weights of `token_weights` and the losses, as linear_cross_entropy says.
        """
        embedded = self.embedding(tokens) if self.pre_process else None
        hidden = self.decoder(embedded, attention_mask=None, packed_seq_params=layout)
        return self.output_layer(hidden, targets, token_weights, scored, weigh) if self.post_process else hidden


class OutputLayer(ColumnParallelLinear):
    """The projection to the vocabulary, split over tensor ranks, joined with the cross entropy."""

    def __init__(self, config: TransformerConfig, vocab_size: int, groups: ProcessGroupCollection):
        super().__init__(config.hidden_size, vocab_size, config=config, init_method=config.init_method, bias=False, tp_group=groups.tp)

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        token_weights: Tensor,
        scored: Tensor | None,
        weigh: Callable[[Tensor, Tensor], Tensor] | None,
    ) -> TokenLoss:
        """hidden [s, b, h] (this tensor rank's share of s under sequence parallelism); the rest as in HybridModel.forward."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)
        if scored is not None:
            hidden = hidden[scored]
        by_sequence = [x.transpose(0, 1).flatten() for x in (targets, token_weights)]
        total, losses = linear_cross_entropy(
            hidden.flatten(0, 1), self.weight, *by_sequence, self.tp_group, weigh, self.gradient_accumulation_fusion
        )
        return TokenLoss(total, losses.view(hidden.shape[:2]).transpose(0, 1))


def build_chunks(run: RunConfig, plan: LayerPlan, state: ParallelState) -> list[HybridModel]:
    """This rank's part of the model on the device, its parameters drawn so that they do not depend on the layout."""
    config = transformer_config(run)
    chunks = [HybridModel(config, run, plan, state, number) for number in range(state.virtual_pipeline)]
    for chunk in chunks:
        initialize_parameters(chunk, run, state)
    return chunks


def build_model(run: RunConfig, plan: LayerPlan, state: ParallelState) -> HybridModel:
    """As `build_chunks`, for a layout under which each rank has one chunk."""
    [model] = build_chunks(run, plan, state)
    return model
