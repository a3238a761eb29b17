"""The whole plan of a recipe as plain data, which `python -m launch plan --json` prints and report.py writes for people.

  recipe, run_dir       as the run will be called
  problems              "recipe": rules broken on every number of GPUs asked for; "8", "16", ...: what else is wrong on so many
  layers                the layer plan in words, or null
  parameters            total, and parts: one a mixer, mlp, norms, embedding, output_layer
  flops_per_token       forward and backward; forward_flops_per_token by part
  state_bytes           by mixer, what a sample of `train.context` tokens leaves for its continuation
  tokens, steps         token budget; optimizer steps
  schedule              points of the curves: step, tokens, lr, batch_tokens; null where they are broken themselves
  possible_sizes        planning/choices.py
and for each number of GPUs, by that number as text; null where the recipe's own layout does not run on so many:
  batch                 samples a step, data (ranks), micro_batches of each, micro_batch (samples), tokens
  rank_grid             layout (sizes), groups of ranks by kind, within_nodes: of each kind whether nodes of 8 GPUs hold its groups whole
  memory_gib_per_gpu    peak, moment (of the peak), stage (that needs most), its parts, device (139), usable, fits; stages: the same of all
  communication_gib_per_step   sent by the busiest GPU, by kind: gradients, parameters, tensor, context, pipeline
  checkpoint_gib        disk (one checkpoint), and of host memory for each GPU: copy (of what it writes beside training), gather (for a
                        moment, when a permanent checkpoint is saved)
  time                  device, peak_flops, mfu, mfu_from, tokens_per_second_per_gpu, step_seconds, hours, gpu_hours
  layouts               all in which the recipe runs: tensor, context, pipeline, data, micro_batches, memory_gib, fits
  suggestion            overrides to paste, recompute, sizes, micro_batch, memory_gib, hours; null if none fits
"""

from dataclasses import asdict

from hybrid_megatron.checkpoint.sizes import checkpoint_bytes, gather_bytes
from hybrid_megatron.config.schema import ParallelConfig, RunConfig
from hybrid_megatron.config.validate import basic_problems
from hybrid_megatron.config.validate_schedule import schedule_problems
from hybrid_megatron.errors import ConfigError
from hybrid_megatron.model.accounting import account
from hybrid_megatron.model.mixers import MIXERS
from hybrid_megatron.model.pattern import LayerPlan, plan_layers
from hybrid_megatron.parallel.rank_grid import rank_groups, within_nodes
from hybrid_megatron.planning.choices import H200_GIB, USABLE, fits, layouts, overrides, possible_sizes, suggest
from hybrid_megatron.planning.communication import communication
from hybrid_megatron.planning.layout import Layout, problems_of
from hybrid_megatron.planning.memory import GIB, Memory, memory, peak_memory, rank_params
from hybrid_megatron.planning.pace import pace
from hybrid_megatron.training.schedule import learning_rate

BY_GPUS = ("batch", "rank_grid", "memory_gib_per_gpu", "communication_gib_per_step", "checkpoint_gib", "time", "layouts", "suggestion")


def make_plan(config: RunConfig, gpus: list[int], mfu: float | None = None) -> dict:
    """The plan on each of these numbers of GPUs; an invalid recipe gets what can be said of it. `mfu` 0 to 1, None: pace.py's."""
    result: dict = {"recipe": config.name, "run_dir": config.run_dir, "problems": _problems(config, gpus)}
    if basic_problems(config):  # whatever is computed below computes with these values
        return result
    curve = None if any(schedule_problems(config)) else schedule_points(config)
    result |= {"tokens": config.train.tokens, "steps": config.num_steps, "schedule": curve}
    plan = _sound_layers(config)
    result["layers"] = None if plan is None else str(plan)
    if plan is None:
        return result
    accounts = account(config, plan)
    result["parameters"] = {"total": accounts.total_params, "parts": accounts.params}
    result["flops_per_token"] = accounts.flops_per_token
    result["forward_flops_per_token"] = accounts.forward_flops_per_token
    result["state_bytes"] = accounts.state_bytes
    result["possible_sizes"] = possible_sizes(config, plan)
    of_counts = [_on(config, plan, count, mfu) for count in gpus]
    return result | {key: {str(count): on[key] for count, on in zip(gpus, of_counts)} for key in BY_GPUS}


def invalid(plan: dict) -> bool:
    """Whether the recipe breaks a rule wherever it was asked to run."""
    problems = plan["problems"]
    return bool(problems["recipe"]) or all(found for count, found in problems.items() if count != "recipe")


def all_problems(plan: dict) -> list[str]:
    """Each broken rule once; those on some numbers of GPUs alone only where all numbers break some."""
    of_counts = [found for count, found in plan["problems"].items() if count != "recipe"]
    told = [plan["problems"]["recipe"], *(of_counts if all(of_counts) else [])]
    return list(dict.fromkeys(problem for problems in told for problem in problems))


def schedule_points(config: RunConfig, count: int = 5) -> list[dict]:
    """Step (1-based), tokens at its end, learning rate and tokens of the batch: of the first step, the first full batch, the end of the
    warm-up, and evenly from there to the last step."""
    batches, last = config.batch_plan, config.num_steps - 1
    warm = min(max(batches.steps_within(config.schedule.warmup_tokens) - 1, 0), last)
    full = min(batches.phases[-1].first_step, last)
    steps = sorted({0, full, *(warm + (last - warm) * i // (count - 1) for i in range(count))})
    return [
        {"step": i + 1, "tokens": batches.tokens(i + 1), "lr": learning_rate(config, i), "batch_tokens": batches.batch_tokens(i)}
        for i in steps
    ]


def _problems(config: RunConfig, gpus: list[int]) -> dict[str, list[str]]:
    by_count = {str(count): problems_of(config, count) for count in gpus}
    everywhere = [p for p in by_count[str(gpus[0])] if all(p in problems for problems in by_count.values())] if len(gpus) > 1 else []
    return {"recipe": everywhere} | {count: [p for p in found if p not in everywhere] for count, found in by_count.items()}


def _sound_layers(config: RunConfig) -> LayerPlan | None:
    """The layers, if they can be built on one GPU."""
    try:
        plan = plan_layers(config)
    except ConfigError:
        return None
    groups = {group for layer in plan for group in layer.groups}
    broken = any(MIXERS[group.mixer].check(config.model, group, ParallelConfig(), config.train.context) for group in groups)
    return None if broken else plan


def _on(config: RunConfig, plan: LayerPlan, gpus: int, mfu: float | None) -> dict:
    result: dict = dict.fromkeys(BY_GPUS)
    result["layouts"] = [_in_short(layout) for layout in layouts(config, plan, gpus)]
    suggested = suggest(config, plan, gpus)
    if suggested is not None:
        parallel, train = suggested.config.parallel, suggested.config.train
        result["suggestion"] = {"overrides": overrides(suggested, config)} | _in_short(suggested)
        result["suggestion"] |= {"sequence": parallel.sequence, "micro_batch": train.micro_batch, "recompute": train.recompute}
        result["suggestion"]["hours"] = pace(suggested, mfu)["hours"]
    if problems_of(config, gpus):
        return result
    layout = Layout(config, plan, gpus)
    groups = rank_groups(config.parallel, gpus)
    result["batch"] = {
        "samples": config.batch_samples,
        "data": layout.data,
        "micro_batches": layout.micro_batches,
        "micro_batch": config.train.micro_batch,
        "tokens": config.train.batch_tokens,
    }
    result["rank_grid"] = {
        "layout": _sizes(layout),
        "groups": groups,
        "within_nodes": {kind: within_nodes(ranks) for kind, ranks in groups.items()},
    }
    result["memory_gib_per_gpu"] = _memory(layout)
    result["communication_gib_per_step"] = {kind: sent / GIB for kind, sent in communication(layout).items()}
    result["checkpoint_gib"] = _checkpoint(layout)
    result["time"] = pace(layout, mfu)
    return result


def _sizes(layout: Layout) -> dict:
    return asdict(layout.config.parallel) | {"data": layout.data}


def _in_short(layout: Layout) -> dict:
    peak, parallel = peak_memory(layout), layout.config.parallel
    sizes = {name: getattr(parallel, name) for name in ("tensor", "context", "pipeline")}
    return sizes | {
        "data": layout.data,
        "micro_batches": layout.micro_batches,
        "memory_gib": peak / GIB,
        "fits": fits(peak),
    }


def _memory(layout: Layout) -> dict:
    stages = memory(layout)
    most = max(stages, key=lambda stage: stage.peak)
    device = {"device": H200_GIB, "usable": H200_GIB * USABLE, "fits": fits(most.peak)}
    return _gib(most) | device | {"stages": [_gib(stage) for stage in stages]}


def _checkpoint(layout: Layout) -> dict:
    stages = range(layout.config.parallel.pipeline)
    most = max(rank_params(layout, stage).total for stage in stages)
    return {
        "disk": checkpoint_bytes(account(layout.config, layout.plan).total_params, layout.element) / GIB,
        "copy": checkpoint_bytes(most, layout.element) / layout.shards / GIB,
        "gather": gather_bytes(most, layout.shards) / GIB,
    }


def _gib(of: Memory) -> dict:
    parts = ("weights", "gradients", "optimizer", "activations", "context")
    sizes = {name: getattr(of, name) / GIB for name in parts}
    moments = {moment: of.at(moment) / GIB for moment in of.moments}
    return {"peak": of.peak / GIB, "moment": of.peak_moment, "stage": of.stage, **sizes, "in_flight": of.in_flight, "moments": moments}
