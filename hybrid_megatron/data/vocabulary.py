"""Token ids against the words of the model, where they are read: a layer would take zeros for a word that it does not have."""

from pathlib import Path

import torch
from torch import Tensor

from hybrid_megatron.command_line import pasted
from hybrid_megatron.errors import DataError


def check_ids(ids: Tensor, words: int, key: str, prefix: Path) -> None:
    """Raise DataError, in a sentence that begins with `key`, if one of ids, of the dataset `prefix`, is not in [0, words)."""
    least, most = (int(bound) for bound in torch.aminmax(ids))
    if least < 0 or most >= words:
        raise DataError(
            f"{key}: it holds the token {least if least < 0 else most}, and the words of model.vocab_size={words} are 0 to {words - 1}; "
            f"see what is wrong with it by {pasted('data_prep', 'verify', prefix)}, and make it again, or train a model of more words"
        )
