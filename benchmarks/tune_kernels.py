"""python benchmarks/tune_kernels.py [--mixers gdn,gla,...] [--widths 128,64] [--processes 8] [--out FILE]

Finds the fastest configurations of flash-linear-attention's kernels on this machine's GPUs, for the shapes that recipes use: whole samples
and masked documents, from their beginning or, under context parallelism, from a state, and passes over states alone. Writes
what hybrid_megatron/ops/tuned_kernels.py reads, into its folder unless --out says otherwise: minutes on one GPU, and then no run on such a
GPU has to look for them. What the file has of other mixers and widths stays.

Every case is a process, which compiles a kernel's configurations side by side; they are timed one at a time a GPU. The kinds of cases come
one after the other, each without what those before it have found.
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
MIXERS = ("gdn", "gla", "kda", "lightning", "mamba2", "rwkv7")
KINDS = {kind: MIXERS for kind in ("whole", "documents", "continued", "continued documents")} | {"states": MIXERS}
"""Samples from their beginning, or from a state that has a gradient, as under context parallelism; and the passes over states alone."""
COMPILERS = 4
"""Of a process, side by side."""


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--mixers", default=",".join(MIXERS))
    parser.add_argument("--widths", default="128,64")
    parser.add_argument("--processes", type=int, default=8, help="at once, a GPU")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.case:
        mixer, width, kind, known = settings.case
        print(json.dumps(tuned(mixer, int(width), kind, json.loads(Path(known).read_text()))))
        return
    from hybrid_megatron import platform
    from hybrid_megatron.ops.tuned_kernels import table_of

    if not platform.is_cuda():
        parser.error("torch sees no CUDA device here, and kernels are tuned on the GPU they are for")
    if unknown := set(settings.mixers.split(",")) - set(MIXERS):
        parser.error(f"--mixers {','.join(sorted(unknown))}: one of {', '.join(MIXERS)}")
    path = settings.out or table_of(platform.device_name())
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if path.exists() else []
    found: dict[tuple, dict] = {}
    for kind, mixers in KINDS.items():
        cases = [(mixer, width, kind) for width in settings.widths.split(",") for mixer in settings.mixers.split(",") if mixer in mixers]
        for entries in measure(cases, list(found.values()), settings.processes):
            found = {_identity(entry): entry for entry in entries} | found  # where two cases have a kernel in common: the first to end
            table = {_identity(entry): entry for entry in before} | found
            lines = ",\n".join(json.dumps(table[identity]) for identity in sorted(table))
            new = path.with_suffix(".new")
            new.write_text(f"[\n{lines}\n]\n")
            new.replace(path)  # what is found stays, whatever happens later
    print(f"{len(found)} configurations found; {len(table)} of {len({entry['kernel'] for entry in table.values()})} kernels in {path}")


def _identity(entry: dict) -> tuple[str, str]:
    return entry["kernel"], json.dumps([entry["key"], entry["dtypes"]])


def measure(cases: list[tuple[str, str, str]], known: list[dict], processes: int) -> Iterator[list[dict]]:
    """What each case finds beyond what is known, as they end."""
    import torch

    gpus = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes * gpus) as pool:
        known_file = Path(folder, "known.json")
        known_file.write_text(json.dumps(known))

        def run(number: int) -> list[dict]:
            began, gpu = time.perf_counter(), number % gpus
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu), "TUNING_LOCK": f"{folder}/gpu{gpu}", "FLA_CACHE_RESULTS": "0"}
            command = [sys.executable, __file__, "--case", *cases[number], str(known_file)]
            ended = subprocess.run(command, env=environment, capture_output=True, text=True)
            name = " ".join(cases[number])
            if ended.returncode:
                print(f"{name}: failed\n{ended.stderr[-2000:]}", flush=True)
                return []
            found = json.loads(ended.stdout.splitlines()[-1])
            print(f"{name:<32}{len(found):>4} configurations{time.perf_counter() - began:>8.0f} s", flush=True)
            return found

        for task in as_completed([pool.submit(run, number) for number in range(len(cases))]):
            yield task.result()


def tuned(mixer: str, width: int, kind: str, known: list[dict]) -> list[dict]:
    """Run the mixer's recurrence forward and backward, and read what Triton's autotuners chose where nothing was known."""
    import torch
    from triton.runtime.autotuner import Autotuner

    from hybrid_megatron import platform
    from hybrid_megatron.ops.kernel_check import example
    from hybrid_megatron.ops.tuned_kernels import entry_of, give_to_autotuners, tuners_of_fla

    give_to_autotuners(known)
    Autotuner.do_bench = property(lambda self: one_at_a_time)  # in the place of what times for 0.1 s and more, with others beside it
    Autotuner.prune_configs = compiling_side_by_side(Autotuner.prune_configs)
    recurrence, inputs = example(mixer, HEADS, width, torch.bfloat16, platform.device(), BATCH, TOKENS)
    inputs = tuple(x.requires_grad_() for x in inputs)
    if kind == "states":
        recurrence.summary(inputs)
        recurrence.initial_state_gradient(inputs, torch.randn_like(inputs[2]), scale=width**-0.5)
    else:
        starts = torch.rand(BATCH, TOKENS, device=platform.device()) < 1 / 700 if "documents" in kind else None
        state = torch.randn(BATCH, HEADS, width, width, device=platform.device(), requires_grad=True) if "continued" in kind else None
        outputs = recurrence.run(inputs, scale=width**-0.5, initial_state=state, document_starts=starts)
        sum(x.float().square().sum() for x in outputs).backward()
    chosen = [entry_of(tuner, key, config) for tuner in tuners_of_fla() for key, config in tuner.cache.items()]
    return [entry for entry in chosen if _identity(entry) not in map(_identity, known)]  # looked up is in the cache too


def compiling_side_by_side(choose):
    """`choose`, Triton's choice of the configurations it times one after the other, but they are compiled all at once first."""
    from triton.runtime._async_compile import AsyncCompileMode

    pool = ThreadPoolExecutor(COMPILERS)

    def chosen(tuner, kwargs: dict) -> list:
        configs = choose(tuner, kwargs)
        with AsyncCompileMode(pool, ignore_errors=True):  # what cannot be compiled says so again when it is timed
            for config in configs:
                tuner.fn.run(*tuner.nargs.values(), **kwargs | {"warmup": True} | config.all_kwargs())
        return configs

    return chosen


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
