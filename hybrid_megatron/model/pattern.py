"""Recipe -> layer plan: the `pattern` of a recipe, written out for every layer of the model."""

from dataclasses import dataclass

from hybrid_megatron.config.schema import HeadShare, PatternEntry, RunConfig
from hybrid_megatron.errors import ConfigError
from hybrid_megatron.model.head_group import HeadGroup
from hybrid_megatron.model.mixers import MIXERS


@dataclass(frozen=True)
class Layer:
    """One layer of the model."""

    number: int
    """1-based, over the whole model, as megatron-core counts."""
    groups: tuple[HeadGroup, ...]
    """One where all heads have the same mixer (layer-wise hybrids), several in a head-wise layer."""

    def __str__(self) -> str:
        """E.g. 'gdn', or '6 gdn + 2 attention (nope) heads'."""
        words = [group.mixer if group.position == MIXERS[group.mixer].default_position else str(group) for group in self.groups]
        if len(words) == 1:
            return words[0]
        return " + ".join(f"{group.heads} {word}" for group, word in zip(self.groups, words)) + " heads"


@dataclass(frozen=True)
class LayerPlan:
    layers: tuple[Layer, ...]

    def __iter__(self):
        return iter(self.layers)

    def __str__(self) -> str:
        """E.g. 'gdn x3, attention (nope) x1, gdn x3, attention (nope) x1'."""
        runs: list[list] = []
        for word in map(str, self.layers):
            if runs and runs[-1][0] == word:
                runs[-1][1] += 1
            else:
                runs.append([word, 1])
        return ", ".join(f"{word} x{count}" for word, count in runs)

    @property
    def mixers(self) -> set[str]:
        """Names of the mixers that occur."""
        return {group.mixer for layer in self.layers for group in layer.groups}


def plan_layers(config: RunConfig) -> LayerPlan:
    """Write the pattern out for `model.num_layers` layers. Raises ConfigError with everything that does not come out even."""
    problems: list[str] = []
    kinds = [_groups(config, entry, f"pattern[{i}]", problems) for i, entry in enumerate(config.pattern)]
    counts = _layers_of_entries(config, problems)
    if problems:
        raise ConfigError(problems)
    layers = [groups for groups, count in zip(kinds, counts) for _ in range(count)]
    layers *= config.model.num_layers // len(layers)
    return LayerPlan(tuple(Layer(i + 1, groups) for i, groups in enumerate(layers)))


def _layers_of_entries(config: RunConfig, problems: list[str]) -> list[int]:
    """Consecutive layers of each entry, the pattern taken once."""
    count = config.model.num_layers
    shares = [entry.share for entry in config.pattern]
    if not shares:
        problems.append("pattern: it is empty; name a mixer, e.g. pattern=[{mixer: attention, position: rope}]")
    elif all(share is None for share in shares):
        repeats = [entry.repeat for entry in config.pattern]
        if count % sum(repeats):
            problems.append(
                f"pattern: it describes {sum(repeats)} layers and model.num_layers={count} is not a multiple of that; "
                f"use {' or '.join(map(str, _multiples_around(count, sum(repeats))))} layers, change repeat, or list every layer"
            )
        return repeats
    elif any(share is None for share in shares) or any(entry.repeat != 1 for entry in config.pattern):
        problems.append("pattern: with `share` in one entry every entry needs it, and none may have `repeat`")
    elif any(count * share % sum(shares) for share in shares):
        problems.append(
            f"pattern: shares {' : '.join(map(str, shares))} do not divide model.num_layers={count} evenly; "
            f"use {' or '.join(map(str, _multiples_around(count, sum(shares))))} layers, or other shares"
        )
    else:
        return [count * share // sum(shares) for share in shares]
    return []


def _multiples_around(count: int, of: int) -> list[int]:
    below = count // of * of
    return [size for size in (below, below + of) if size > 0]


def _groups(config: RunConfig, entry: PatternEntry, where: str, problems: list[str]) -> tuple[HeadGroup, ...]:
    heads = config.model.num_heads
    if (entry.mixer is None) == (not entry.heads):
        has = "has neither" if entry.mixer is None else "has both"
        problems.append(f"{where}: it needs `mixer`, or `heads` with one entry or more, and {has}; give one of the two")
        return ()
    if entry.mixer is not None:
        return (_group(entry, heads, where, problems),)
    if entry.position is not None:
        problems.append(f"{where}.position={entry.position}: in a head-wise entry each of its `heads` says its own position")
    shares = [part.share for part in entry.heads]
    if len(shares) > heads:
        problems.append(f"{where}.heads: {len(shares)} mixers cannot share model.num_heads={heads} heads; name at most {heads}")
    elif any(heads * share % sum(shares) for share in shares):
        sums = ", ".join(str(size) for size in range(len(shares), heads + 1) if heads % size == 0)
        problems.append(
            f"{where}.heads: shares {' : '.join(map(str, shares))} do not divide model.num_heads={heads} evenly; "
            f"use shares that add up to one of {sums}, or another number of heads"
        )
    return tuple(_group(part, heads * part.share // sum(shares), f"{where}.heads[{i}]", problems) for i, part in enumerate(entry.heads))


def _group(entry: PatternEntry | HeadShare, heads: int, where: str, problems: list[str]) -> HeadGroup:
    if entry.mixer not in MIXERS:
        problems.append(f"{where}.mixer={entry.mixer}: there is no such mixer; mixers are {', '.join(MIXERS)}")
        return HeadGroup(entry.mixer, "nope", heads)
    default = MIXERS[entry.mixer].default_position
    position = default if entry.position is None else entry.position
    if position not in ("rope", "nope"):
        said = f"mixer={entry.mixer}: its position" if entry.position is None else f"position={entry.position}: it"
        problems.append(f"{where}.{said} must be rope or nope" + (f", or left out for {default}" if default else ""))
    return HeadGroup(entry.mixer, position, heads)
