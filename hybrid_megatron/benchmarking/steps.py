"""Timing of training steps, the same for recipes and peers."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hybrid_megatron import platform


@dataclass(frozen=True)
class Timing:
    first_ended: float
    """time.time() at the end of the first step."""
    first_seconds: float
    seconds: list[float]
    """Of each timed step."""


def time_steps(step: Callable[[], object], warmup: int, steps: int) -> Timing:
    """The first step, `warmup` more, then `steps` timed ones, by events on CUDA and by the clock elsewhere. Nothing is waited for between
    timed steps but by the step itself."""
    began = time.perf_counter()
    step()
    platform.synchronize()
    first = time.perf_counter() - began
    ended = time.time()
    for _ in range(warmup):
        step()
    platform.synchronize()
    return Timing(ended, first, _by_events(step, steps) if platform.is_cuda() else _by_clock(step, steps))


def _by_events(step: Callable[[], object], steps: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    platform.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in zip(events, events[1:])]


def _by_clock(step: Callable[[], object], steps: int) -> list[float]:
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return seconds
