"""Recipe -> layer plan: the `pattern` of a recipe, written out for every layer of the model."""

from dataclasses import dataclass

from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.errors import ConfigError


@dataclass(frozen=True)
class Layer:
    """One layer of the model."""

    number: int
    """1-based, over the whole model, as megatron-core counts."""
    mixer: str
    position: str | None
    """rope, nope, or None for a mixer that takes no position."""


@dataclass(frozen=True)
class LayerPlan:
    layers: tuple[Layer, ...]

    def __iter__(self):
        return iter(self.layers)

    def __str__(self) -> str:
        """E.g. 'gdn x3, attention (nope) x1, gdn x3, attention (nope) x1'."""
        runs: list[list] = []
        for layer in self.layers:
            word = layer.mixer + (f" ({layer.position})" if layer.position else "")
            if runs and runs[-1][0] == word:
                runs[-1][1] += 1
            else:
                runs.append([word, 1])
        return ", ".join(f"{word} x{count}" for word, count in runs)


def plan_layers(config: RunConfig) -> LayerPlan:
    """Repeat the pattern to `model.num_layers`. Raises ConfigError if it does not come out even."""
    once = [entry for entry in config.pattern for _ in range(entry.repeat)]
    count = config.model.num_layers
    if not once or count % len(once):
        raise ConfigError(
            f"pattern: it describes {len(once)} layers and model.num_layers={count} is not a multiple of that; "
            "change repeat or num_layers, or list every layer"
        )
    return LayerPlan(tuple(Layer(i + 1, entry.mixer, entry.position) for i, entry in enumerate(once * (count // len(once)))))
