"""One cell, measured in this process: a row of the table as plain data.

gpus, layout, device, torch, triton       where
parameters, micro_batch, micro_batches, recompute, precision, tokens (a step, all ranks)
step_seconds                              median of the timed steps; fastest_step_seconds, slowest_step_seconds
tokens_per_second_per_gpu, model_tflops_per_gpu, mfu
peak_memory_gib, reserved_memory_gib      of the rank that needs most; planned_memory_gib is what `plan` says
first_step_seconds                        with compilation and autotuning
start_to_first_step_seconds               from the start of the process: imports, checks of kernels and the making of the model too
first_loss, last_loss                     of the first step and the last one
profile                                   profile.py; null unless asked for
"""

import statistics
import time

import torch

from hybrid_megatron import platform
from hybrid_megatron.benchmarking.cells import PROFILED_STEPS, Cell
from hybrid_megatron.benchmarking.made_up import made_up_dataset
from hybrid_megatron.benchmarking.profile import profile_steps
from hybrid_megatron.benchmarking.sizing import config_of
from hybrid_megatron.benchmarking.steps import Timing, time_steps
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.errors import RunError
from hybrid_megatron.model.accounting import account
from hybrid_megatron.model.kernels import check_kernels
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.parallel import start
from hybrid_megatron.parallel.state import world_size
from hybrid_megatron.planning.layout import Layout
from hybrid_megatron.planning.memory import GIB, peak_memory
from hybrid_megatron.training.build import build_trainer
from hybrid_megatron.training.optimizer import set_hyperparameters
from hybrid_megatron.training.schedule import learning_rate
from hybrid_megatron.training.stability import Stability
from hybrid_megatron.training.step import train_step


def measure(cell: Cell, process_began: float) -> dict:
    """The row of a recipe: its own training step, from the same functions as `python -m launch train`. Collective; every rank gets it."""
    platform.select_device()
    config = config_of(cell, world_size(), device_bytes())
    plan = plan_layers(config)
    with start(config.parallel, config.seed) as state:
        with state.together():
            check_kernels(config, plan)
        trainer = build_trainer(config, state, made_up_dataset(config), None)
        judge, losses = Stability(config).judge, []

        def step() -> None:
            done = len(losses)
            set_hyperparameters(trainer.optimizer, learning_rate(config, done), config.optimizer.weight_decay)
            result = train_step(config, trainer.model, trainer.optimizer, trainer.train_stream, done, state, judge)
            if not result.decision.update:  # a step without an update is no training step
                raise RunError(f"step {done + 1}: {result.decision.findings[0].sentence}")
            losses.append(result.losses.lm_loss)

        timing = time_steps(step)
        peaks = state.of_all_ranks(memory_gib())
        row = describe(config, timing, process_began, account(config, plan).flops_per_token)
        row |= {
            "gpus": state.world_size,
            "layout": state.layout | {"sequence": config.parallel.sequence},
            "parameters": account(config, plan).total_params,
            "planned_memory_gib": peak_memory(Layout(config, plan, state.world_size)) / GIB,
            **{name: max(peak[name] for peak in peaks) for name in peaks[0]},
            "profile": profile_steps(step, PROFILED_STEPS) if cell.profile else None,
            "first_loss": losses[0],
            "last_loss": losses[-1],
        }
        return row


def describe(config: RunConfig, timing: Timing, process_began: float, flops_per_token: float | None) -> dict:
    """What rows of recipes and of peers have in common, on one GPU or as many as there are."""
    seconds, gpus = statistics.median(timing.seconds), world_size()
    rate = config.train.batch_tokens / seconds / gpus
    peak = platform.peak_flops()
    return {
        "device": platform.device_name(),
        "torch": torch.__version__,
        "triton": _triton(),
        "micro_batch": config.train.micro_batch,
        "micro_batches": Layout(config, plan_layers(config), gpus).micro_batches,
        "recompute": config.train.recompute,
        "precision": config.train.precision,
        "tokens": config.train.batch_tokens,
        "step_seconds": seconds,
        "fastest_step_seconds": min(timing.seconds),
        "slowest_step_seconds": max(timing.seconds),
        "tokens_per_second_per_gpu": rate,
        "model_tflops_per_gpu": None if flops_per_token is None else rate * flops_per_token / 1e12,
        "mfu": None if flops_per_token is None or peak is None else rate * flops_per_token / peak,
        "first_step_seconds": timing.first_seconds,
        "start_to_first_step_seconds": timing.first_ended - process_began,
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def memory_gib() -> dict[str, float]:
    """Peak of this process so far: of tensors, and of what torch holds for them (not known on a CPU)."""
    reserved = {"reserved_memory_gib": torch.cuda.max_memory_reserved() / GIB} if platform.is_cuda() else {}
    return {"peak_memory_gib": platform.peak_memory_gib()} | reserved


def device_bytes() -> int | None:
    """Of this GPU; None on a CPU."""
    return torch.cuda.get_device_properties(platform.device()).total_memory if platform.is_cuda() else None


def _triton() -> str | None:
    if not platform.is_cuda():
        return None
    import triton  # exists on Linux only

    return triton.__version__
