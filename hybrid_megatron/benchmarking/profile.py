"""Where the time of a step goes, from torch.profiler's trace.

  steps              how many were profiled
  step_seconds       of one, as the device saw them: from its first kernel to the end of its last, profiling included
  split_seconds      of one step by kind (kernel_kinds.py); they add up to step_seconds
  kernels            of one step
  top                the kernels that take most: name, kind, seconds and calls a step
  synchronisations   calls a step in which the host waits for the device, by name of the CUDA call
  waits              lines of code that wait, with their number a step, as far as torch knows them (.item() and the like)

On a CPU torch's operators stand for kernels, and nothing synchronises.
"""

import contextlib
import json
import math
import tempfile
import traceback
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hybrid_megatron import platform
from hybrid_megatron.benchmarking.kernel_kinds import KINDS, OTHER, kind_of

GAP_MICROSECONDS = 20.0
_STEP = "bench: one step"
_TOP = 20
_OPERATORS = ("aten::", "c10d::", "gloo:")
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cuStreamSynchronize", "cuCtxSynchronize")
_ROOT = Path(__file__).parents[2]

Span = tuple[float, float]
"""Begin and end in microseconds."""


def profile_steps(step: Callable[[], object], count: int) -> dict:
    """Profile `count` steps after one that warms the profiler up, and take one more to find the lines that wait."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if platform.is_cuda() else [])
    with profile(activities=activities, acc_events=True):
        step()
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(count):
            with record_function(_STEP):
                step()
        platform.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        result = analyse(json.loads(path.read_text())["traceEvents"])
    with waits_noted() as places:
        step()
    return result | {"waits": dict(places.most_common())}


def analyse(events: list[dict]) -> dict:
    """The figures above from a Chrome trace's events, all but `waits`."""
    events = [event for event in events if event.get("ph") == "X"]
    steps = [_span(event) for event in events if event["name"] == _STEP and event.get("cat") == "user_annotation"]
    work = [event for event in events if event.get("cat") in _DEVICE_WORK] or _operators(events, steps)
    split = split_by_kind((_span(event), kind_of(event["name"])) for event in work)
    waits = Counter(event["name"] for event in events if event["name"] in _WAITS and _within(_span(event), steps))
    seconds, calls = Counter(), Counter()
    for event in work:
        seconds[event["name"]] += event["dur"] / 1e6
        calls[event["name"]] += event.get("call", 1)
    count = len(steps)
    return {
        "steps": count,
        "step_seconds": sum(split.values()) / 1e6 / count,
        "split_seconds": {kind: split.get(kind, 0.0) / 1e6 / count for kind in (*KINDS, OTHER)},
        "kernels": calls.total() / count,
        "top": [
            {"name": name, "kind": kind_of(name), "seconds": total / count, "calls": calls[name] / count}
            for name, total in seconds.most_common(_TOP)
        ],
        "synchronisations": {name: number / count for name, number in waits.items()},
    }


def split_by_kind(work: Iterable[tuple[Span, str]]) -> dict[str, float]:
    """Microseconds by kind, from the beginning of the first span to the end of the last; each moment counts once.

    Where computations overlap, the one that began first has the time; communication has what no computation covers.
    """
    work = sorted(work)
    split: Counter[str] = Counter()
    busy: list[Span] = []
    for communicates in (False, True):
        taken, free_from = [], -math.inf
        for (begin, end), kind in work:
            if (kind == "communication") == communicates:
                pieces = _outside((max(begin, free_from), end), busy)
                split[kind] += sum(end - begin for begin, end in pieces)
                taken += pieces
                free_from = max(free_from, end)
        busy = _merged(busy + taken)
    for (_, end), (begin, _) in zip(busy, busy[1:]):
        split["gaps" if begin - end < GAP_MICROSECONDS else "host"] += begin - end
    return dict(split)


def _outside(span: Span, covered: list[Span]) -> list[Span]:
    """The parts of a span that sorted, separate spans do not cover."""
    begin, end = span
    pieces = []
    for low, high in covered[max(0, bisect_right(covered, span) - 1) :]:
        if low >= end:
            break
        if low > begin:
            pieces.append((begin, low))
        begin = max(begin, high)
    return [*pieces, (begin, end)] if begin < end else pieces


def _merged(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _operators(events: list[dict], steps: list[Span]) -> list[dict]:
    """Torch's operators of the steps, each as the parts of its time in which none that it called ran; `call` is 1 for one part of each."""
    by_thread: dict = {}
    for event in events:
        if event.get("cat") == "cpu_op" and event["name"].startswith(_OPERATORS) and _within(_span(event), steps):
            by_thread.setdefault(event["tid"], []).append(event)
    parts = []
    for operators in by_thread.values():
        for operator, called in _with_called(operators):
            own = _outside(_span(operator), called)
            parts += [operator | {"ts": begin, "dur": end - begin, "call": int(i == 0)} for i, (begin, end) in enumerate(own)]
    return parts


def _with_called(operators: list[dict]) -> list[tuple[dict, list[Span]]]:
    """Each operator of a thread with the spans of those that it called itself."""
    found: list[tuple[dict, list[Span]]] = []
    running: list[tuple[dict, list[Span]]] = []
    for operator in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        while running and operator["ts"] >= _span(running[-1][0])[1]:
            running.pop()
        if running:
            running[-1][1].append(_span(operator))
        running.append((operator, []))
        found.append(running[-1])
    return found


def _span(event: dict) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _within(span: Span, steps: list[Span]) -> bool:
    return any(begin <= span[0] and span[1] <= end for begin, end in steps)


@contextlib.contextmanager
def waits_noted() -> Iterator[Counter]:
    """Counts the lines of code that make the host wait for the device, as torch warns of them."""
    places: Counter[str] = Counter()

    def note(message, category, filename, lineno, file=None, line=None) -> None:
        if "synchronizing CUDA operation" in str(message):
            places[_place(traceback.extract_stack()[:-1])] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        if platform.is_cuda():
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            if platform.is_cuda():
                torch.cuda.set_sync_debug_mode("default")


def _place(stack: traceback.StackSummary) -> str:
    """The innermost line of this project, and the line it called if that is elsewhere."""
    frames = [frame for frame in stack if Path(frame.filename).name != "warnings.py"]
    ours = next((frame for frame in reversed(frames) if Path(frame.filename).is_relative_to(_ROOT)), frames[-1])
    where = [ours] if ours is frames[-1] else [ours, frames[-1]]
    return " > ".join(f"{_short(frame.filename)}:{frame.lineno} {frame.name}" for frame in where)


def _short(path: str) -> str:
    if Path(path).is_relative_to(_ROOT):
        return str(Path(path).relative_to(_ROOT))
    return path.rpartition("site-packages/")[2]
