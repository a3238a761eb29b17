"""A recipe as it is run in a benchmark: how many samples at once, how many steps."""

from dataclasses import replace

from hybrid_megatron.benchmarking.cells import Cell, load_for_bench
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.config.validate import validate
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.planning.choices import RECOMPUTE, USABLE
from hybrid_megatron.planning.layout import Layout
from hybrid_megatron.planning.memory import peak_memory


def config_of(cell: Cell, gpus: int, device_bytes: int | None) -> RunConfig:
    """The recipe as the cell runs it on `gpus` devices of so many bytes (None: it does not matter).

    As many tokens at once as the recipe has at its own context, or less (then with recomputation) if they do not fit; the learning rate
    rises over the whole run. Raises ConfigError with every rule broken.
    """
    config = load_for_bench(cell.recipe, cell.overrides)
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


def _halves(samples: int) -> list[int]:
    return [samples] if samples == 1 else [samples, *_halves(samples // 2)]


def _sized(config: RunConfig, cell: Cell, gpus: int, micro_batch: int, recompute: str) -> RunConfig:
    parallel = config.parallel
    model_ranks = parallel.tensor * parallel.context * parallel.pipeline
    micro_batches = 1 if parallel.pipeline == 1 else 4 * parallel.pipeline
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
    validate(sized, gpus)
    return sized
