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
from hybrid_megatron.preflight.gpus import Device
from hybrid_megatron.preflight.job import Job
from hybrid_megatron.preflight.report import Finding, Level

SLOW = 0.85
"""Least share of the usual speed: GPUs of one kind differ by some 5% under one power limit, and a step goes at the pace of the slowest."""
LOW = 0.5
"""Least share of the datasheet's peak for the usual speed itself; a large bf16 product reaches 0.7 to 0.8 of it."""
SAME = 1e-5
"""Largest relative difference of checksums: the same product, summed in float64, of GPUs that compute right."""


@dataclass(frozen=True)
class Speed:
    """Of one rank's device, medians over short windows, so that a single hiccup counts for nothing."""

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
    one, end = math.inf, time.perf_counter() + seconds / 5
    while time.perf_counter() < end or one == math.inf:
        one = min(one, _seconds_of(operation, 3) / 3)
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


def usual(values) -> float:
    """What two thirds of the values do not exceed: of two or three the fastest, so that a slow one is no measure of itself."""
    values = sorted(values)
    return values[2 * len(values) // 3]


def judge_speed(job: Job, devices: list[Device], speeds: list[Speed]) -> list[Finding]:
    tflops = [speed.tflops for speed in speeds]
    of_nodes = (f"{node} {' '.join(f'{tflops[rank]:.3g}' for rank in ranks)}" for node, ranks in job.ranks.items())
    told = f"GEMM {', '.join(of_nodes)} TFLOP/s; memory {min(speed.gbytes for speed in speeds):.3g} GB/s at least"
    if not devices[0].is_cuda:
        return [Finding("speed", Level.UNKNOWN, f"{told}; not judged on CPUs")]
    findings = _slow(job, "GEMM", tflops, "TFLOP/s") + _slow(job, "memory", [speed.gbytes for speed in speeds], "GB/s")
    findings += _wrong(job, [speed.checksum for speed in speeds])
    peak = peak_flops_of(devices[0].name)
    if peak and usual(tflops) * 1e12 < LOW * peak:
        found = f"{usual(tflops):.0f} TFLOP/s are usual here, less than {LOW:.0%} of the {peak / 1e12:.0f} of {devices[0].name}"
        findings.append(Finding("speed", Level.WARNING, f"{found}; nvidia-smi -q -d POWER,CLOCK says what holds it down"))
    return findings + [Finding("speed", Level.FINE, told)]


def _slow(job: Job, what: str, values: list[float], unit: str) -> list[Finding]:
    most = usual(values)
    return [
        _bad(job, rank, f"reaches {value:.0f} {unit} ({what}), less than {SLOW:.0%} of the {most:.0f} that are usual here")
        for rank, value in enumerate(values)
        if value < SLOW * most
    ]


def _wrong(job: Job, checksums: list[float]) -> list[Finding]:
    """A GPU that computes wrongly would spoil the run without a word."""
    right = statistics.median_low([each for each in checksums if math.isfinite(each)] or [1.0])
    return [
        _bad(job, rank, f"computes another product than the others (sum {each:.9g}, theirs {right:.9g}); have it tested")
        for rank, each in enumerate(checksums)
        if not abs(each - right) <= SAME * right
    ]


def _bad(job: Job, rank: int, found: str) -> Finding:
    return Finding("speed", Level.BAD_NODE, f"{job.place(rank)} {found}", job.nodes_of([rank]))
