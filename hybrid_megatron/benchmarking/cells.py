"""What is measured: recipes and their peers at some contexts. Imports nothing heavy: the command itself measures nothing."""

from dataclasses import dataclass, replace
from pathlib import Path

from hybrid_megatron.config import load_recipe
from hybrid_megatron.config.schema import RunConfig

PATTERNS = (
    "rope", "rope_nope_lh", "rope_nope_hh", "swa_nope_lh", "swa_nope_hh", "gla_nope_lh", "gla_nope_hh", "gdn_nope_lh", "gdn_nope_hh",
)  # fmt: skip
"""Of the papers' main comparison, as far as their global layers have no position."""
RECIPES = tuple(f"776m+{pattern}" for pattern in PATTERNS)
CONTEXTS = (4096, 32_768)
PEERS = {"llama": None, "fla_gdn": "gdn", "fla_gla": "gla", "fla_kda": "kda", "fla_rwkv7": "rwkv7"}
"""Names of peers (peers.py), each with the mixer that a recipe must have for it to run beside it; None: beside every recipe."""
WARMUP_STEPS = 3
"""After the first step and before the timed ones."""
TIMED_STEPS = 10
PROFILED_STEPS = 3
_STAGE = "pretrain_4k"


@dataclass(frozen=True)
class Cell:
    recipe: str
    """Of a peer: the recipe whose width, depth and batch it has."""
    context: int
    peer: str | None = None
    """A name in PEERS; None: the recipe itself."""
    peers_like: str | None = None
    """The recipe whose size the peers beside this one have."""
    overrides: tuple[str, ...] = ()
    profile: bool = False
    round: int = 1

    @property
    def name(self) -> str:
        return self.recipe if self.peer is None else f"{self.peer} like {self.recipe}"

    @property
    def total_steps(self) -> int:
        """Steps taken: the first, warm-up, timed; with a profile, those in it, one before and one after."""
        return 1 + WARMUP_STEPS + TIMED_STEPS + (PROFILED_STEPS + 2 if self.profile else 0)


def make_cells(recipes: list[str], contexts: list[int] | None, rounds: int = 1, peers: bool = False, **settings) -> list[Cell]:
    """Each recipe at each context (None: at its own), and the peers of each model size behind its first recipe; every second round in
    reverse, so that what drifts over the minutes drifts alike for all. `settings` are other fields of Cell. Raises ConfigError."""
    configs = {recipe: load_for_bench(recipe, settings.get("overrides", ())) for recipe in recipes}
    like: dict[tuple, str] = {}  # the first recipe of each size
    for recipe, config in configs.items():
        like.setdefault(_size(config), recipe)
    cells = []
    for context in contexts or sorted({config.train.context for config in configs.values()}):
        for recipe, config in configs.items():
            if contexts is None and config.train.context != context:
                continue
            first = like[_size(config)]
            cells.append(Cell(recipe, context, peers_like=first, **settings))
            if peers and not any(cell.peer and (cell.context, cell.recipe) == (context, first) for cell in cells):
                same_size = [other for other in configs.values() if _size(other) == _size(config)]
                cells += [Cell(first, context, peer, first, **settings) for peer in PEERS if _runs_beside(peer, same_size)]
    return [replace(cell, round=i + 1) for i in range(rounds) for cell in (cells if i % 2 == 0 else cells[::-1])]


def load_for_bench(recipe: str, overrides: tuple[str, ...]) -> RunConfig:
    """The recipe with nothing to read from a disk; one without a stage gets the pretraining stage beneath it. Raises ConfigError."""
    whole = ":" in recipe or Path(recipe).is_file()
    words = [recipe if whole else f"{_STAGE}+{recipe}", "init_from=null", "data.train=made_up", "data.valid=null", *overrides]
    return load_recipe(words)


def _size(config: RunConfig) -> tuple[int, ...]:
    model = config.model
    return model.num_layers, model.hidden_size, model.num_heads, model.num_kv_heads or 0, model.ffn_size, model.vocab_size


def _runs_beside(peer: str, configs: list[RunConfig]) -> bool:
    mixer = PEERS[peer]
    return mixer is None or any(
        mixer == part.mixer for config in configs for entry in config.pattern for part in (entry, *(entry.heads or ()))
    )
