"""The embedding, its vocabulary split over tensor ranks: megatron-core's weight, whose rows are written sequence first where they belong,
and whose gradient is added to its buffer without a dense one."""

from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_megatron.ops.embedding import embed
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region, reduce_scatter_to_sequence_parallel_region
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class Embedding(MegatronModule):
    """Its parameter has the name that it has in megatron-core's models: `word_embeddings.weight`."""

    def __init__(self, config: TransformerConfig, vocab_size: int, tp_group: ProcessGroup):
        super().__init__(config=config)
        self.word_embeddings = WordEmbeddings(config, vocab_size, tp_group)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [b, s] -> [s, b, h], this tensor rank's share of s under sequence parallelism."""
        return self.word_embeddings(tokens.transpose(0, 1))


class WordEmbeddings(VocabParallelEmbedding):
    def __init__(self, config: TransformerConfig, vocab_size: int, tp_group: ProcessGroup):
        super().__init__(
            vocab_size,
            config.hidden_size,
            init_method=config.embedding_init_method,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
            tp_group=tp_group,
        )
        self.gradient_accumulation_fusion = False  # switched on where there are gradient buffers (training/weight_gradients.py)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [s, b] -> [s, b, h], this tensor rank's share of s under sequence parallelism."""
        rows = embed(tokens, self.weight, self.vocab_start_index, self.gradient_accumulation_fusion)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(rows, group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(rows, group=self.tp_group) if self.tp_group.size() > 1 else rows
