"""Timing of training steps, the same for recipes and peers."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hybrid_megatron import platform
from hybrid_megatron.benchmarking.cells import TIMED_STEPS, WARMUP_STEPS


@dataclass(frozen=True)
class Timing:
    first_ended: float
    """time.time() at the end of the first step."""
    first_seconds: float
    seconds: list[float]
    """Of each timed step."""


def time_steps(step: Callable[[], object]) -> Timing:
    """The first step, some to warm up, then the timed ones, by events on CUDA and by the clock elsewhere. Nothing is waited for between
    timed steps but by the step itself."""
    began = time.perf_counter()
    step()
    platform.synchronize()
    first = time.perf_counter() - began
    ended = time.time()
    for _ in range(WARMUP_STEPS):
        step()
    platform.synchronize()
    return Timing(ended, first, _by_events(step) if platform.is_cuda() else _by_clock(step))


def _by_events(step: Callable[[], object]) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED_STEPS + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    platform.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in zip(events, events[1:])]


def _by_clock(step: Callable[[], object]) -> list[float]:
    seconds = []
    for _ in range(TIMED_STEPS):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return seconds
