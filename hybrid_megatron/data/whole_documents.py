"""Samples that each begin where a document does, so that none mixes documents: for training on long documents at a long context."""

import numpy as np
import torch
from torch import Tensor


class WholeDocuments:
    """One sample for each document that fills one: its first tokens, `context` of them and the one after. One epoch in a seeded order."""

    def __init__(self, tokens: np.ndarray, borders: np.ndarray, context: int, seed: int):
        """tokens as they lie in the dataset; borders [documents + 1], where documents begin, and the number of tokens."""
        lengths = np.diff(borders)
        self.longest = int(lengths.max(initial=0))
        """Tokens of the longest document."""
        fitting = borders[:-1][lengths > context]
        self._tokens, self._context = tokens, context
        self._begins = np.random.default_rng(seed).permutation(fitting)

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """tokens and labels [context] int64."""
        begin = int(self._begins[index])
        row = torch.from_numpy(self._tokens[begin : begin + self._context + 1].astype(np.int64))
        return {"tokens": row[:-1], "labels": row[1:]}
