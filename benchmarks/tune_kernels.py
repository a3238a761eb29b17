"""python benchmarks/tune_kernels.py [--mixers gdn,gla,...] [--widths 128,64] [--processes 8] [--out FILE]

Finds the fastest configurations of flash-linear-attention's kernels on this machine's GPUs, for the shapes that recipes use: whole samples
and masked documents, from their beginning or, under context parallelism, from a state, and the run that makes a transition matrix. Writes
what hybrid_megatron/ops/tuned_kernels.py reads, into its folder unless --out says otherwise: minutes on one GPU, and then no run on such a
GPU has to look for them.

Every case is a process; configurations are compiled side by side and timed one at a time a GPU.
"""

import argparse
import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

BATCH, TOKENS, HEADS = 8, 4096, 12
KINDS = ("whole", "documents", "continued", "continued documents", "summary")
"""Samples from their beginning, or from a state that has a gradient, as under context parallelism; and what makes transition matrices."""
SUMMARY_BY_KERNELS = ("gdn", "kda", "rwkv7")
"""Mixers whose transition matrix is made by FLA's kernels; the others' summaries are sums in torch."""


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--mixers", default="gdn,gla,kda,lightning,mamba2,rwkv7")
    parser.add_argument("--widths", default="128,64")
    parser.add_argument("--processes", type=int, default=8, help="at once, a GPU")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.case:
        mixer, width, kind = settings.case.split(maxsplit=2)
        print(json.dumps(tuned(mixer, int(width), kind)))
        return
    from hybrid_megatron import platform
    from hybrid_megatron.ops.tuned_kernels import table_of, write_table

    mixers = settings.mixers.split(",")
    kinds = {mixer: KINDS if mixer in SUMMARY_BY_KERNELS else KINDS[:-1] for mixer in mixers}
    cases = [f"{mixer} {width} {kind}" for width in settings.widths.split(",") for mixer in mixers for kind in kinds[mixer]]
    path = settings.out or table_of(platform.device_name())
    for entries in measure(cases, settings.processes):
        write_table(entries, path)  # what is found stays, whatever happens later
    print(f"{len(entries)} configurations of {len({entry['kernel'] for entry in entries})} kernels in {path}")


def measure(cases: list[str], processes: int) -> Iterator[list[dict]]:
    """All entries so far, after each case; where two cases have a kernel in common, that of the first to end."""
    import torch

    gpus = torch.cuda.device_count()
    entries: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes * gpus) as pool:

        def run(number: int) -> list[dict]:
            began, gpu = time.perf_counter(), number % gpus
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu), "TUNING_LOCK": f"{folder}/gpu{gpu}", "FLA_CACHE_RESULTS": "0"}
            command = [sys.executable, __file__, "--case", cases[number]]
            ended = subprocess.run(command, env=environment, capture_output=True, text=True)
            if ended.returncode:
                print(f"{cases[number]}: failed\n{ended.stderr[-2000:]}", flush=True)
                return []
            found = json.loads(ended.stdout.splitlines()[-1])
            print(f"{cases[number]:<32}{len(found):>4} configurations{time.perf_counter() - began:>8.0f} s", flush=True)
            return found

        for found in (task.result() for task in as_completed([pool.submit(run, number) for number in range(len(cases))])):
            for entry in found:
                entries.setdefault(json.dumps([entry["kernel"], entry["key"], entry["dtypes"]]), entry)
            yield sorted(entries.values(), key=lambda entry: (entry["kernel"], json.dumps(entry["key"])))


def tuned(mixer: str, width: int, kind: str) -> list[dict]:
    """Run the mixer's recurrence forward and backward, and read what Triton's autotuners chose."""
    import torch
    from triton.runtime.autotuner import Autotuner

    from hybrid_megatron import platform
    from hybrid_megatron.ops.kernel_check import example
    from hybrid_megatron.ops.tuned_kernels import entry_of, tuners_of_fla

    Autotuner.do_bench = property(lambda self: one_at_a_time)  # in the place of what times for 0.1 s and more, with others beside it
    recurrence, inputs = example(mixer, HEADS, width, torch.bfloat16, platform.device(), BATCH, TOKENS)
    inputs = tuple(x.requires_grad_() for x in inputs)
    if kind == "summary":
        outputs = recurrence.summary(inputs)
    else:
        starts = torch.rand(BATCH, TOKENS, device=platform.device()) < 1 / 700 if "documents" in kind else None
        state = torch.randn(BATCH, HEADS, width, width, device=platform.device(), requires_grad=True) if "continued" in kind else None
        outputs = recurrence.run(inputs, scale=width**-0.5, initial_state=state, document_starts=starts)
    sum(x.float().square().sum() for x in outputs if x.requires_grad).backward()
    return [entry_of(tuner, key, config) for tuner in tuners_of_fla() for key, config in tuner.cache.items()]


def one_at_a_time(kernel_call, quantiles):
    """Compile without waiting for others, then time alone on this GPU."""
    import torch
    from triton.testing import do_bench

    kernel_call()
    torch.cuda.synchronize()
    with open(os.environ["TUNING_LOCK"], "a") as lock, contextlib.ExitStack() as stack:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stack.callback(fcntl.flock, lock, fcntl.LOCK_UN)
        return do_bench(kernel_call, warmup=5, rep=30, quantiles=quantiles)


if __name__ == "__main__":
    main()
