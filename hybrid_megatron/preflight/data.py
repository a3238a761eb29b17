"""The datasets of a recipe: complete, of its tokenizer, with index maps, on every node."""

import warnings
from pathlib import Path

from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.data import open_dataset
from hybrid_megatron.data.datasets import SPLITS, files_of
from hybrid_megatron.errors import NoIndexMaps, UserError
from hybrid_megatron.preflight.seen import Seen, see

_OURS = Path(__file__).resolve().parents[1]


def gather_data(config: RunConfig, words: list[str]) -> dict[str, Seen]:
    """What this node sees of each dataset, by `data.train` and `data.valid`. `words`: the recipe as typed, for the ways out."""
    prefixes = {split: getattr(config.data, split) for split in SPLITS}
    return {f"data.{split}": _seen(config, words, split, Path(prefix)) for split, prefix in prefixes.items() if prefix is not None}


def _seen(config: RunConfig, words: list[str], split: str, prefix: Path) -> Seen:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            dataset = open_dataset(config, split)
        except UserError as error:
            error = error.of_recipe(words) if isinstance(error, NoIndexMaps) else error
            return see(prefix.parent, [], problem=str(error))
    remarks = [str(each.message) for each in said if Path(each.filename).is_relative_to(_OURS)]  # megatron-core's are silenced elsewhere
    return see(prefix.parent, files_of(dataset), identity=dataset.fingerprint, remarks=remarks)
