"""How fast each GPU multiplies and moves memory: a second of bf16 products and of copies, all GPUs at once as in training.

The slow ones are found by comparison with the others, since what is normal depends on the kind of GPU, its power limit and the library.
On CPUs the same is measured and nothing is judged: processes that share cores are as slow as their neighbours are busy.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hybrid_megatron import platform
from hybrid_megatron.platform.device import peak_flops_of
from hybrid_megatron.preflight.finding import Finding, Level, fine
from hybrid_megatron.preflight.gpus import Device
from hybrid_megatron.preflight.job import Job

SLOW = 0.85
"""Least share of the median speed: GPUs of one kind differ by some 5% under one power limit."""
LOW = 0.5
"""Least share of the datasheet's peak for the median itself; a large bf16 product reaches 0.7 to 0.8 of it."""
SAME = 1e-5
"""Largest relative difference of checksums: the same product, summed in float64, of GPUs that compute right."""


@dataclass(frozen=True)
class Speed:
    """Of one rank's device, medians over short windows."""

    tflops: float
    """TFLOP/s of a square product: bf16 on a GPU, float32 on a CPU."""
    gbytes: float
    """GB/s of a copy within memory, bytes read and written."""
    checksum: float
    """Sum of the product's magnitudes; its factors are the same on every rank."""


def gather_speed() -> Speed:
    cuda = platform.is_cuda()
    tflops, checksum = _product(8192, torch.bfloat16, 1.0) if cuda else _product(256, torch.float32, 0.05)
    return Speed(tflops, _copy(2**30, 0.3) if cuda else _copy(2**22, 0.02), checksum)


def _product(size: int, dtype: torch.dtype, seconds: float) -> tuple[float, float]:
    """TFLOP/s, and the sum of the product's magnitudes."""
    lines = torch.randn(4, size, generator=torch.Generator().manual_seed(0)).to(platform.device())
    a, b = (torch.outer(lines[i], lines[i + 1]).to(dtype) for i in (0, 2))  # to draw whole matrices takes seconds on a CPU
    product = torch.empty_like(a)
    seconds = _median_seconds(lambda: torch.mm(a, b, out=product), seconds)
    return 2 * size**3 / seconds / 1e12, float(product.double().abs().sum())


def _copy(size: int, seconds: float) -> float:
    """GB/s of a copy of so many bytes, which are read and written."""
    source = torch.ones(size // 4, device=platform.device())
    target = torch.empty_like(source)
    return 2 * size / _median_seconds(lambda: target.copy_(source), seconds) / 1e9


def _median_seconds(operation: Callable, seconds: float) -> float:
    """Of one call: the median over windows of some 10 ms each, for so many seconds, after a fifth of that to warm up."""
    for _ in range(3):
        operation()
    end = time.perf_counter() + seconds / 5
    one = math.inf
    while time.perf_counter() < end or one == math.inf:
        one = min(one, _seconds_of(operation, 1))
    calls = max(1, round(0.01 / one))
    windows, end = [], time.perf_counter() + seconds
    while not windows or time.perf_counter() < end:
        windows.append(_seconds_of(operation, calls) / calls)
    return statistics.median(windows)


def _seconds_of(operation: Callable, calls: int) -> float:
    platform.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        operation()
    platform.synchronize()
    return time.perf_counter() - began


def judge_speed(job: Job, devices: list[Device], speeds: list[Speed]) -> list[Finding]:
    told = f"{_range(speed.tflops for speed in speeds)} TFLOP/s, memory {_range(speed.gbytes for speed in speeds)} GB/s"
    if not devices[0].is_cuda:
        return [fine("speed", f"{told} (not judged on CPUs)")]
    findings = _slow(job, "GEMM", [speed.tflops for speed in speeds], "TFLOP/s")
    findings += _slow(job, "memory bandwidth", [speed.gbytes for speed in speeds], "GB/s")
    findings += _wrong(job, speeds)
    peak, median = peak_flops_of(devices[0].name), statistics.median_high([speed.tflops for speed in speeds])
    if peak and median * 1e12 < LOW * peak:
        rule = f"less than {LOW:.0%} of the {peak / 1e12:.0f} of {devices[0].name}"
        findings.append(
            Finding("GEMM", Level.WARNING, f"the median GPU reaches {median:.0f} TFLOP/s", rule, "nvidia-smi -q -d POWER,CLOCK")
        )
    return findings or [fine("speed", told)]


def _slow(job: Job, what: str, values: list[float], unit: str) -> list[Finding]:
    """Of two the faster one is the measure, so that the slow one is named."""
    median = statistics.median_high(values)
    rule = f"the median is {median:.0f}, and {SLOW:.0%} of it are the least"
    return [
        Finding(what, Level.BAD_NODE, f"{job.place(rank, 'GPU')} reaches {value:.0f} {unit}", rule, nodes=(job.node_of(rank),))
        for rank, value in enumerate(values)
        if value < SLOW * median
    ]


def _wrong(job: Job, speeds: list[Speed]) -> list[Finding]:
    usual = statistics.median_low([speed.checksum for speed in speeds if math.isfinite(speed.checksum)] or [1.0])
    wrong = [rank for rank, speed in enumerate(speeds) if not abs(speed.checksum - usual) <= SAME * usual]
    return [
        Finding(
            "GEMM",
            Level.BAD_NODE,
            f"{job.place(rank, 'GPU')} computes another product than the others (sum {speeds[rank].checksum:.9g}, theirs {usual:.9g})",
            way_out="it would spoil the run without a word; have it tested",
            nodes=(job.node_of(rank),),
        )
        for rank in wrong
    ]


def _range(values) -> str:
    values = list(values)
    low, high = (f"{value:.3g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
