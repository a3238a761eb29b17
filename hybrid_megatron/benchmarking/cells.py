"""What is measured: a recipe, or one of its peers, at one context. And the recipe as it is run there."""

from dataclasses import dataclass, replace
from pathlib import Path

from hybrid_megatron.config import load_recipe
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.config.validate import validate
from hybrid_megatron.errors import ConfigError
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.planning.choices import RECOMPUTE, USABLE
from hybrid_megatron.planning.layout import Layout
from hybrid_megatron.planning.memory import peak_memory

PATTERNS = (
    "rope", "rope_nope_lh", "rope_nope_hh", "swa_nope_lh", "swa_nope_hh", "gla_nope_lh", "gla_nope_hh", "gdn_nope_lh", "gdn_nope_hh",
)  # fmt: skip
"""Of the papers' main comparison, as far as their global layers have no position."""
RECIPES = tuple(f"776m+{pattern}" for pattern in PATTERNS)
CONTEXTS = (4096, 32_768)
_STAGE = "pretrain_4k"


@dataclass(frozen=True)
class Cell:
    recipe: str
    """Of a peer: the recipe whose width, depth and batch it has."""
    context: int
    peer: str | None = None
    """A name in PEERS; None: the recipe itself."""
    overrides: tuple[str, ...] = ()
    warmup: int = 3
    """Steps after the first and before the timed ones."""
    steps: int = 10
    micro_batches: int | None = None
    """Of a step on each data-parallel rank; None: one, or four for each stage of a pipeline."""
    profile: bool = False
    round: int = 1

    @property
    def name(self) -> str:
        return self.recipe if self.peer is None else f"{self.peer} as {self.recipe}"

    @property
    def total_steps(self) -> int:
        """Steps taken at most: the first, warm-up, timed, profiled."""
        return 1 + self.warmup + self.steps + (PROFILED_STEPS + 2 if self.profile else 0)


PROFILED_STEPS = 3


def make_cells(recipes: list[str], contexts: list[int], peers: list[str], rounds: int, **settings) -> list[Cell]:
    """Each recipe at each context, the peers of each model size after the first recipe of that size; every second round in reverse, so that
    what drifts over the minutes drifts alike for all."""
    cells = []
    for context in contexts:
        sizes = []
        for recipe in recipes:
            cells.append(Cell(recipe, context, **settings))
            model = _loaded(recipe, settings.get("overrides", ())).model
            size = (model.num_layers, model.hidden_size, model.num_heads, model.ffn_size, model.vocab_size)
            if size not in sizes:
                sizes.append(size)
                cells += [Cell(recipe, context, peer, **settings) for peer in peers]
    return [replace(cell, round=i + 1) for i in range(rounds) for cell in (cells if i % 2 == 0 else cells[::-1])]


def config_of(cell: Cell, gpus: int, device_bytes: int | None) -> RunConfig:
    """The recipe as the cell runs it on `gpus` devices of so many bytes (None: it does not matter).

    As many tokens at once as the recipe has at its own context, or less (then with recomputation) if they do not fit; the learning rate
    rises over the whole run. Raises ConfigError with every rule broken.
    """
    config = _loaded(cell.recipe, cell.overrides)
    exact = any(word.startswith("train.micro_batch=") for word in cell.overrides)
    samples = config.train.micro_batch if exact else max(1, config.train.micro_batch * config.train.context // cell.context)
    choices = [(config.train.recompute, samples)]
    if not exact:
        kinds = RECOMPUTE[RECOMPUTE.index(config.train.recompute) :] if config.train.recompute in RECOMPUTE else ()
        choices = [(recompute, size) for recompute in kinds for size in _halves(samples)] or choices
    for recompute, micro_batch in choices:
        sized = _sized(config, cell, gpus, micro_batch, recompute)
        if device_bytes is None or peak_memory(Layout(sized, plan_layers(sized), gpus)) <= USABLE * device_bytes:
            break
    return sized


def _loaded(recipe: str, overrides: tuple[str, ...]) -> RunConfig:
    """A recipe without a stage gets the pretraining stage beneath it."""
    whole = ":" in recipe or Path(recipe).is_file()
    words = [recipe if whole else f"{_STAGE}+{recipe}", "init_from=null", "data.train=made_up", "data.valid=null", *overrides]
    return load_recipe(words)


def _halves(samples: int) -> list[int]:
    return [samples] if samples == 1 else [samples, *_halves(samples // 2)]


def _sized(config: RunConfig, cell: Cell, gpus: int, micro_batch: int, recompute: str) -> RunConfig:
    parallel = config.parallel
    model_ranks = parallel.tensor * parallel.context * parallel.pipeline
    micro_batches = cell.micro_batches or (1 if parallel.pipeline == 1 else 4 * parallel.pipeline)
    batch_tokens = micro_batch * cell.context * max(1, gpus // max(1, model_ranks)) * micro_batches
    tokens = cell.total_steps * batch_tokens
    train = replace(
        config.train, tokens=tokens, context=cell.context, batch_tokens=batch_tokens, micro_batch=micro_batch, recompute=recompute
    )
    schedule = replace(
        config.schedule, warmup_tokens=tokens - batch_tokens, shape="constant", decay_tokens=None, min_lr=0.0, start_batch_tokens=None,
        batch_warmup_tokens=0,
    )  # fmt: skip
    sized = replace(config, name=cell.recipe, train=train, schedule=schedule)
    try:
        validate(sized, gpus)
    except ConfigError as error:
        raise ConfigError([f"{cell.name} at {cell.context:,} tokens: {problem}" for problem in error.problems]) from None
    return sized
