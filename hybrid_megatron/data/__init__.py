"""Indexed datasets made by data_prep -> samples -> batches."""

from hybrid_megatron.data.batches import Batch, BatchStream
from hybrid_megatron.data.datasets import Dataset, TokenStream, build_index_caches, open_dataset, open_tokens

__all__ = ["Batch", "BatchStream", "Dataset", "TokenStream", "build_index_caches", "open_dataset", "open_tokens"]
