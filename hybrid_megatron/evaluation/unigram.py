"""The unigram baseline: what is known about a token from the training set's word counts alone."""

import numpy as np

from data_prep.indexed_dataset import IndexedDataset
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.data import open_dataset


def unigram_cross_entropy(config: RunConfig) -> float:
    """Cross entropy, nats a token, of the training set's unigram model on the very targets that `validation_loss` is measured on.

    Counts get one added, so that a word the training set lacks has a probability. Reads the whole training set: for small ones.
    """
    counts = np.bincount(IndexedDataset(config.data.train).tokens, minlength=config.model.vocab_size) + 1
    log_probabilities = np.log(counts / counts.sum())
    samples = open_dataset(config, "valid").samples
    measured = min(config.validation.samples, len(samples))
    return float(-np.mean([log_probabilities[samples[i]["labels"].numpy()] for i in range(measured)]))
