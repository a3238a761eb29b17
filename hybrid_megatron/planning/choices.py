"""What is possible: sizes of each kind of parallelism, layouts of a number of GPUs, and the one to take."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.config.setting_types import as_written
from hybrid_megatron.config.validate import context_problems, layer_problems, tensor_problems
from hybrid_megatron.model.pattern import LayerPlan
from hybrid_megatron.model.unit_order import UnitOrder
from hybrid_megatron.parallel.rank_grid import GPUS_OF_A_NODE
from hybrid_megatron.planning.layout import Layout, problems_of
from hybrid_megatron.planning.memory import GIB, peak_memory
from hybrid_megatron.planning.pace import expected_mfu

H200_GIB = 139.0
"""Memory of one H200 that tensors can have at most."""
USABLE = 0.92
"""The part of it to fill: the rest is for CUDA, NCCL's buffers, the workspaces of kernels and fragmentation."""
RECOMPUTE = ("none", "selective", "full")
MOST_CONTEXT_RANKS = 64
"""Looked at."""


def fits(bytes_: float) -> bool:
    return bytes_ <= USABLE * H200_GIB * GIB


def possible_sizes(config: RunConfig, plan: LayerPlan) -> dict:
    """Sizes of each kind that the model and the context allow: `tensor`, and what limits it (`units` of each kind of layer, `ffn_size`,
    `vocab_size`); `context` at the recipe's tensor size, up to 64 ranks; `pipeline`; `virtual_pipeline` for each `pipeline` above 1."""
    count, units = config.model.num_layers, {str(layer): UnitOrder(config.model, layer.groups).units for layer in plan}
    tensor, stages = _tensor_sizes(config, plan), _divisors(count)
    return {
        "tensor": tensor,
        "units": units,
        "ffn_size": config.model.ffn_size,
        "vocab_size": config.model.vocab_size,
        "context": _context_sizes(config, plan, config.parallel.tensor if config.parallel.tensor in tensor else 1),
        "pipeline": stages,
        "virtual_pipeline": {str(n): _divisors(count // n) for n in stages if n > 1},
    }


def layouts(config: RunConfig, plan: LayerPlan, gpus: int) -> list[Layout]:
    """Every layout of so many GPUs that the recipe runs in as it is but for its parallel sizes; least tensor, context, pipeline first."""
    found = []
    for sizes in _sizes(config, plan, gpus):
        changed = _with(config, sizes)
        if not problems_of(changed, gpus):
            found.append(Layout(changed, plan, gpus))
    return found


def suggest(config: RunConfig, plan: LayerPlan, gpus: int) -> Layout | None:
    """The layout that fits in memory and is expected to be fastest (pace.py), or None if none fits.

    Of several that are expected to be as fast, the first of: least recomputation (none, selective, full), then least tensor (never beyond a
    node), then least context, then least pipeline, then the largest micro-batch. Sequence parallelism comes with tensor; virtual_pipeline
    is left at 1.
    """
    candidates = []
    for recompute in RECOMPUTE:
        for sizes in _sizes(config, plan, gpus):
            data = gpus // (sizes["tensor"] * sizes["context"] * sizes["pipeline"])
            samples, rest = divmod(config.batch_samples, data)
            for micro_batch in reversed(_divisors(samples)) if samples and not rest else ():
                candidates.append(Layout(_with(config, sizes, recompute, micro_batch), plan, gpus))
    fastest_first = sorted(candidates, key=expected_mfu, reverse=True)  # stable
    return next((layout for layout in fastest_first if fits(peak_memory(layout)) and not problems_of(layout.config, gpus)), None)


def overrides(layout: Layout, config: RunConfig) -> list[str]:
    """What to type behind the recipe of `config` to get `layout`."""
    new = layout.config
    keys = [f"parallel.{key}" for key in ("tensor", "sequence", "context", "pipeline", "virtual_pipeline")]
    words = []
    for key in [*keys, "train.micro_batch", "train.recompute"]:
        section, name = key.split(".")
        value = getattr(getattr(new, section), name)
        if value != getattr(getattr(config, section), name):
            words.append(f"{key}={as_written(value)}")
    return words


def _tensor_sizes(config: RunConfig, plan: LayerPlan) -> list[int]:
    most = max(UnitOrder(config.model, layer.groups).units for layer in plan)
    return [n for n in range(1, most + 1) if _allowed(config, plan, tensor_problems, tensor=n, context=1)]


def _context_sizes(config: RunConfig, plan: LayerPlan, tensor: int) -> list[int]:
    return [n for n in range(1, MOST_CONTEXT_RANKS + 1) if _allowed(config, plan, context_problems, tensor=tensor, context=n)]


def _allowed(config: RunConfig, plan: LayerPlan, rule: Callable[[RunConfig], Iterator[str]], **sizes: int) -> bool:
    """Whether neither the rule nor any layer has anything against these sizes."""
    changed = replace(config, parallel=replace(config.parallel, **sizes))
    return not any(rule(changed)) and not any(layer_problems(changed, plan))


def _sizes(config: RunConfig, plan: LayerPlan, gpus: int) -> list[dict[str, int]]:
    """Tensor, context and pipeline sizes that are possible and whose product divides the GPUs."""
    return [
        {"tensor": tensor, "context": context, "pipeline": pipeline}
        for tensor in _tensor_sizes(config, plan)
        if tensor <= GPUS_OF_A_NODE
        for context in _context_sizes(config, plan, tensor)
        for pipeline in _divisors(config.model.num_layers)
        if gpus % (tensor * context * pipeline) == 0
    ]


def _with(config: RunConfig, sizes: dict[str, int], recompute: str | None = None, micro_batch: int | None = None) -> RunConfig:
    parallel = replace(config.parallel, **sizes, sequence=sizes["tensor"] > 1, virtual_pipeline=1)
    train = replace(config.train, recompute=recompute or config.train.recompute, micro_batch=micro_batch or config.train.micro_batch)
    return replace(config, parallel=parallel, train=train)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
