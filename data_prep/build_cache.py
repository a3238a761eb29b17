"""`build-cache`: build the index maps of a recipe's datasets once, before any training process starts.

Megatron otherwise builds them at start-up on every node at once, which races on a shared file system.
"""

from pathlib import Path


def build_cache(words: list[str]) -> list[Path]:
    """Build the caches of the recipe that `words` (a recipe and `a.b=c` overrides) describe; returns their folders. Imports torch.

    Raises `ConfigError` for a recipe that no number of processes could train, `DataError` for datasets that do not fit it.
    """
    from hybrid_megatron.config import load_recipe
    from hybrid_megatron.config.validate import validate
    from hybrid_megatron.data import build_index_caches

    config = load_recipe(words)
    validate(config, config.parallel.tensor * config.parallel.context * config.parallel.pipeline)
    return build_index_caches(config)
