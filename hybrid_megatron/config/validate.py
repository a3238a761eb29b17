"""Rules between settings. `validate` reports every broken one at once; each rule is one function of a few lines."""

import math
from collections.abc import Iterator
from dataclasses import fields, replace

from hybrid_megatron.config.schema import ParallelConfig, RunConfig
from hybrid_megatron.config.validate_longce import longce_problems
from hybrid_megatron.config.validate_schedule import SHAPES, batch_problems, schedule_problems
from hybrid_megatron.config.validate_stability import NON_FINITE, SPIKE, stability_problems
from hybrid_megatron.config.validate_tracking import tracking_problems
from hybrid_megatron.errors import ConfigError
from hybrid_megatron.model.attention.backends import BACKENDS
from hybrid_megatron.model.linear import LINEAR
from hybrid_megatron.model.mixers import MIXERS
from hybrid_megatron.model.norm import NORM
from hybrid_megatron.model.pattern import Layer, LayerPlan, plan_layers
from hybrid_megatron.model.unit_order import UnitOrder

PRECISIONS = ("bf16", "fp32")


def validate(config: RunConfig, world_size: int) -> None:
    """Raise ConfigError naming every rule that `config` breaks when run on `world_size` processes."""
    basic = basic_problems(config)
    if basic:  # the rules below compute with these values
        raise ConfigError(basic)
    rules = (
        _layers, tensor_problems, _sequence, context_problems, pipeline_problems, schedule_problems, longce_problems, stability_problems,
        tracking_problems, watchdog_problems,
    )  # fmt: skip
    problems = [problem for rule in rules for problem in rule(config)]
    problems += _world_and_batch(config, world_size)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def basic_problems(config: RunConfig) -> list[str]:
    """Numbers that are out of range and words that are none of the allowed: nothing can be computed from them."""
    return [problem for rule in (_positive, _choices) for problem in rule(config)]


def _positive(config: RunConfig) -> Iterator[str]:
    names = (
        "model", "parallel", "optimizer", "schedule", "longce", "train", "validation", "checkpoint", "stability", "tracking", "watchdog",
    )  # fmt: skip
    sections = [("", config), *((name, getattr(config, name)) for name in names)]
    sections += [(f"model.{mixer}", getattr(config.model, mixer)) for mixer in MIXERS]
    sections += [(f"pattern[{i}]", entry) for i, entry in enumerate(config.pattern)]
    sections += [(f"pattern[{i}].heads[{j}]", part) for i, entry in enumerate(config.pattern) for j, part in enumerate(entry.heads)]
    for section, values in sections:
        yield from not_positive(section, values)
    if config.seed >= 2**32:
        yield f"seed={config.seed}: it must be less than 2^32"
    for name in ("beta1", "beta2"):
        if getattr(config.optimizer, name) >= 1:
            yield f"optimizer.{name}={getattr(config.optimizer, name)}: it must be less than 1"


def not_positive(section: str, values) -> Iterator[str]:
    """The numbers of one section that are not above 0, or 0 where that has a meaning."""
    may_be_zero = {"weight_decay", "warmup_tokens", "batch_warmup_tokens", "min_lr", "seed", "beta1", "beta2", "short_conv"}
    for field in fields(values):
        value = getattr(values, field.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{section}.{field.name}={value}: it must be a finite number".lstrip(".")
        elif not value > 0 and not (field.name in may_be_zero and value == 0):
            least = "0 or more" if field.name in may_be_zero else "more than 0"
            yield f"{section}.{field.name}={value}: it must be {least}".lstrip(".")


def _choices(config: RunConfig) -> Iterator[str]:
    yield from not_among(
        ("model.attention.backend", config.model.attention.backend, BACKENDS),
        ("model.kernels.linear", config.model.kernels.linear, LINEAR),
        ("model.kernels.norm", config.model.kernels.norm, NORM),
        ("train.precision", config.train.precision, PRECISIONS),
        ("train.recompute", config.train.recompute, ("none", "selective", "full")),
        ("schedule.shape", config.schedule.shape, SHAPES),
        *exchanges(config.parallel),
        ("stability.non_finite", config.stability.non_finite, NON_FINITE),
        ("stability.loss_spike", config.stability.loss_spike, SPIKE),
        ("stability.grad_norm_spike", config.stability.grad_norm_spike, SPIKE),
        ("tracking.wandb", config.tracking.wandb, ("auto", "online", "offline", "disabled")),
    )


def exchanges(parallel: ParallelConfig) -> list[tuple[str, str, tuple[str, ...]]]:
    """How context ranks exchange tokens, as `not_among` takes it."""
    return [
        ("parallel.context_attention", parallel.context_attention, ("gather", "all_to_all")),
        ("parallel.context_linear", parallel.context_linear, ("states", "all_to_all")),
    ]


def not_among(*settings: tuple[str, str, tuple[str, ...]]) -> Iterator[str]:
    """Of (key, value, allowed values) those whose value is not allowed."""
    for key, value, allowed in settings:
        if value not in allowed:
            yield f"{key}={value}: it must be one of {', '.join(allowed)}"


def _layers(config: RunConfig) -> Iterator[str]:
    try:
        plan = plan_layers(config)
    except ConfigError as error:
        yield from error.problems
        return
    yield from layer_problems(config, plan)


def layer_problems(config: RunConfig, plan: LayerPlan) -> Iterator[str]:
    """What each mixer says of its heads, and the tensor size against each layer's units."""
    parallel, context = config.parallel, config.train.context
    found: dict[Layer, None] = {}  # one layer of each kind
    for layer in plan:
        found.setdefault(replace(layer, number=0))
    problems = [
        problem
        for layer in found
        for group in layer.groups
        for problem in MIXERS[group.mixer].check(config.model, group, parallel, context)
    ]
    yield from problems
    if problems:
        return
    units = {str(layer): UnitOrder(config.model, layer.groups).units for layer in found}
    if any(count % parallel.tensor for count in units.values()):
        said = ", ".join(f"{count} in layers of {layer}" for layer, count in units.items())
        whole = (*units.values(), config.model.ffn_size, config.model.vocab_size)
        sizes = [size for size in range(1, min(units.values()) + 1) if all(count % size == 0 for count in whole)]
        yield (
            f"parallel.tensor={parallel.tensor}: it must divide the units of heads that may not be cut, {said}; "
            f"use one of {', '.join(map(str, sizes))}"
        )


def tensor_problems(config: RunConfig) -> Iterator[str]:
    tensor = config.parallel.tensor
    for key in ("ffn_size", "vocab_size"):
        value = getattr(config.model, key)
        if value % tensor:
            yield f"parallel.tensor={tensor}: it must divide model.{key}={value}; use another tensor size, or {value + -value % tensor}"


def _sequence(config: RunConfig) -> Iterator[str]:
    parallel, context = config.parallel, config.train.context
    yield from sequence_alone(parallel)
    if parallel.sequence and context % (parallel.context * parallel.tensor):
        yield (
            f"parallel.sequence=true: train.context={context} must be a multiple of parallel.context * parallel.tensor = "
            f"{parallel.context * parallel.tensor}; change one of them"
        )


def sequence_alone(parallel: ParallelConfig) -> Iterator[str]:
    if parallel.sequence and parallel.tensor == 1:
        yield "parallel.sequence=true: it splits over the tensor ranks and parallel.tensor=1; leave it out or raise parallel.tensor"


def context_problems(config: RunConfig) -> Iterator[str]:
    size, context = config.parallel.context, config.train.context
    if size > 1 and context % (2 * size):
        yield f"parallel.context={size}: each rank takes two chunks, so train.context={context} must be a multiple of {2 * size}"


def pipeline_problems(config: RunConfig) -> Iterator[str]:
    stages, chunks, layers = config.parallel.pipeline, config.parallel.virtual_pipeline, config.model.num_layers
    if layers % stages:
        yield f"parallel.pipeline={stages}: it must divide model.num_layers={layers}; use one of {_divisors(layers)}"
    elif layers % (stages * chunks):
        yield (
            f"parallel.virtual_pipeline={chunks}: pipeline * virtual_pipeline = {stages} * {chunks} must divide model.num_layers={layers}; "
            f"with parallel.pipeline={stages} use one of {_divisors(layers // stages)}"
        )
    if chunks > 1 and stages == 1:
        yield (
            f"parallel.virtual_pipeline={chunks}: it cuts pipeline stages into chunks and parallel.pipeline=1; "
            "leave it out or raise parallel.pipeline"
        )


def watchdog_problems(config: RunConfig) -> Iterator[str]:
    watchdog = config.watchdog
    if watchdog.step_seconds is not None and watchdog.first_step_seconds < watchdog.step_seconds:
        yield (
            f"watchdog.first_step_seconds={watchdog.first_step_seconds:g}: the first step does what a later one does and compiles kernels, "
            f"so it must have at least watchdog.step_seconds={watchdog.step_seconds:g}"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)


def _world_and_batch(config: RunConfig, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    if problem := world_problem(parallel, world_size):
        yield problem
        return
    yield from batch_problems(config, data=world_size // (parallel.tensor * parallel.context * parallel.pipeline))


def world_problem(parallel: ParallelConfig, world_size: int) -> str | None:
    """What is wrong with the layout on `world_size` processes, if anything is."""
    model_ranks = parallel.tensor * parallel.context * parallel.pipeline
    if world_size % model_ranks == 0:
        return None
    return (
        f"parallel: tensor * context * pipeline = {parallel.tensor} * {parallel.context} * {parallel.pipeline} = {model_ranks} "
        f"must divide the {world_size} process{'es' if world_size > 1 else ''} of this run; start a multiple of {model_ranks} with "
        f"torchrun --nproc-per-node, or lower one of them"
    )
