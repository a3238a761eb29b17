"""Recipe -> config. `load_recipe(words)` reads, `validate(config, world_size)` checks, `megatron.py` maps to megatron-core."""

from hybrid_megatron.config.load import load_recipe, load_settings, save_config
from hybrid_megatron.config.schema import EvaluationConfig, RunConfig
from hybrid_megatron.config.setting_types import as_written

__all__ = ["EvaluationConfig", "RunConfig", "as_written", "load_recipe", "load_settings", "save_config"]
