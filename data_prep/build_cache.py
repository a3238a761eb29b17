"""`build-cache`: build the index maps of a recipe's datasets once, before any training process starts.

Megatron otherwise builds them at start-up on every node at once, which races on a shared file system.
"""

from pathlib import Path


def build_cache(words: list[str]) -> list[Path]:
    """Build the caches of the recipe that `words` (a recipe and `a.b=c` overrides) describe; returns their folders. Imports torch."""
    from hybrid_megatron.config import load_recipe
    from hybrid_megatron.data import build_index_caches

    return build_index_caches(load_recipe(words))
