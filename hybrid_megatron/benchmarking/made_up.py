"""Samples of random tokens: the speed of a training step does not depend on what they say."""

from pathlib import Path

import torch
from torch import Tensor

from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.data import Dataset

_DOCUMENTS = 8  # of a sample, where documents are masked
_DIFFERENT = 64


class MadeUpSamples:
    """As one epoch of a dataset: `self[i]` has tokens and labels [context], and cu_seqlens under `data.document_mask`.

    Documents have random lengths. The same few samples return, so that drawing them takes no time from the steps.
    """

    def __init__(self, config: RunConfig, count: int):
        self.count = count
        self.context, self.masked = config.train.context, config.data.document_mask
        draw = torch.Generator().manual_seed(config.seed)
        different = min(count, _DIFFERENT)
        self.tokens = torch.randint(config.model.vocab_size, (different, self.context + 1), generator=draw)
        borders = torch.rand(different, _DOCUMENTS - 1, generator=draw).mul(self.context - 1).long().add(1).sort(dim=1).values
        ends = torch.full((different, 1), self.context)
        self.borders = torch.cat((torch.zeros_like(ends), borders, ends), dim=1)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = index % len(self.tokens)
        sample = {"tokens": self.tokens[row, :-1], "labels": self.tokens[row, 1:]}
        if self.masked:
            sample["cu_seqlens"] = self.borders[row]
        return sample


def made_up_dataset(config: RunConfig) -> Dataset:
    """One epoch that lasts for the whole run, with no file behind it."""
    return Dataset(
        "made up", Path("made_up"), MadeUpSamples(config, config.num_steps * config.batch_samples), "made up", config.model.vocab_size
    )
