"""Recipe -> config. `load_recipe(words)` reads, `validate(config, world_size)` checks, `megatron.py` maps to megatron-core."""

from hybrid_megatron.config.load import load_recipe, save_config
from hybrid_megatron.config.schema import RunConfig

__all__ = ["RunConfig", "load_recipe", "save_config"]
