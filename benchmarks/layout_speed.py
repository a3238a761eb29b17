"""python benchmarks/layout_speed.py [--gpus N] [--only MODEL@CONTEXT,...] [--recommended] [--seconds 600] [--add FILE] [--out DIR]

Training steps of each model size under each layout that N GPUs of one host allow, against the same recipe on one GPU: tokens per second
and GPU, MFU, memory, and the efficiency, tokens per second per GPU over those on one GPU. The layouts are the ones that the recipes
recommend (slurm/train_8xh200.sbatch) and the obvious alternatives; 776m+gdn_nope_lh also at 131,072 tokens, everything recomputed on one
GPU and on N alike.

--gpus         all there are, unless said
--only         some of them, e.g. 776m@4096,776m gdn@131072
--recommended  of the layouts only the recommended one
--seconds      no measurement begins later than this
--add          a layout_speed.json of earlier measurements on the same kind of machine: they stay, and only what is missing is measured

Writes layout_speed.json into --out ($OUT, or this folder). On a CPU, as a trial: --gpus 2 --only tiny@128,tiny@256
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Queue
from threading import Lock, Thread

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from hybrid_megatron.benchmarking.cells import Cell  # noqa: E402
from tests.cpu.ranks import Ranks  # noqa: E402

MODELS = {
    "776m": "776m+rope", "776m gdn": "776m+gdn_nope_lh", "376m": "376m+rope", "1b": "1b+rope", "3b": "3b+rope", "tiny": "776m+rope+tiny",
}  # fmt: skip
LONG = 131_072
ALL = ",".join(
    [f"{model}@{context}" for context in (4096, 32_768) for model in ("776m", "776m gdn", "1b", "3b", "376m")] + [f"776m gdn@{LONG}"]
)


@dataclass(frozen=True)
class Measurement:
    model: str
    context: int
    layout: str
    words: tuple[str, ...]
    gpus: int


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--only", default=ALL)
    parser.add_argument("--recommended", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--add", type=Path)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "benchmarks")))
    settings = parser.parse_args()
    gpus = settings.gpus or gpus_here()
    if gpus < 2:
        sys.exit(f"error: --gpus {gpus}: layouts need at least two")
    wanted = [model_and_context(each) for each in settings.only.split(",")]
    settings.out.mkdir(parents=True, exist_ok=True)
    earlier = json.loads(settings.add.read_text())["rows"] if settings.add and settings.add.exists() else []
    rows = [row for row in earlier if row["failed"] is None]
    done = {(row["model"], row["context"], row["layout"]) for row in rows}
    planned = measurements(wanted, gpus, settings.recommended)
    missing = [each for each in planned if (each.model, each.context, each.layout) not in done]
    for row in measured(missing, gpus, settings.seconds):
        rows.append(row)
        (settings.out / "layout_speed.json").write_text(json.dumps({"gpus": gpus, "rows": rows}, indent=1) + "\n")
    print(table(rows))


def model_and_context(text: str) -> tuple[str, int]:
    model, _, context = text.partition("@")
    if model not in MODELS or not context.isdigit():
        sys.exit(f"error: --only {text}: it must be MODEL@CONTEXT, e.g. 776m@4096; models are {', '.join(MODELS)}")
    return model, int(context)


def gpus_here() -> int:
    import torch

    return torch.cuda.device_count() or sys.exit("error: torch sees no GPU here; on a CPU: --gpus 2 --only tiny@128,tiny@256")


def measurements(wanted: list[tuple[str, int]], gpus: int, recommended: bool) -> list[Measurement]:
    """Those on one GPU first: some of them can run beside each other."""
    alone, spread = [], []
    for model, context in wanted:
        same = ("train.recompute=full",) if context == LONG else ()
        alone.append(Measurement(model, context, "one GPU", same, 1))
        found = [Measurement(model, context, layout, (*words, *same), gpus) for layout, words in layouts(model, context, gpus)]
        spread += found[:1] if recommended else found
    return alone + spread


def layouts(model: str, context: int, gpus: int) -> list[tuple[str, tuple[str, ...]]]:
    """(name, words), the recommended one first; what the words do not say is data parallel."""
    data = (f"data {gpus}", ())
    tensor = (f"tensor 2, data {gpus // 2}", ("parallel.tensor=2", "parallel.sequence=true"))
    pipeline = (f"pipeline 2, data {gpus // 2}", ("parallel.pipeline=2",))
    ranks = gpus if context == LONG else 2
    rest = "" if context == LONG else f", data {gpus // 2}"
    spread = (f"context {ranks}{rest}", (f"parallel.context={ranks}",))
    by_heads = (f"context {ranks}, attention by heads{rest}", (*spread[1], "parallel.context_attention=all_to_all"))
    if context == LONG:
        return [spread, by_heads]
    if context > 4096:
        return [spread, by_heads, data, tensor] if model == "3b" else [data, spread, by_heads, tensor]
    return [data, tensor, pipeline] if model in ("776m", "3b") else [data, tensor]


def measured(wanted: list[Measurement], gpus: int, seconds: float) -> Iterator[dict]:
    """A row each, as benchmarking/measure.py has it, with `model`, `context`, `layout`, `gpus` and `failed`. Those on one GPU first, one
    on each GPU at a time, then those on all. The processes live from one measurement to the next: coming up takes longer than measuring."""
    end = time.monotonic() + seconds

    def rows(asked: list[Measurement], here: Callable[[], Ranks]) -> Iterator[dict]:
        group = None
        while True:
            try:
                each = asked.pop(0)  # several threads take from one list
            except IndexError:
                break
            if time.monotonic() > end:
                print(f"{each.model} at {each.context:,}, {each.layout}: left out, no time", flush=True)
                continue
            group = group or here()
            row = row_of(each, group)
            told = row["failed"] or f"{row['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU"
            print(f"{each.model} at {each.context:,}, {each.layout}: {told}", flush=True)
            if row["failed"]:  # nothing of it is left for the next
                group.close()
                group = None
            yield row
        if group:
            group.close()

    def those_alone(gpu: int, told: Queue) -> None:
        try:
            for row in rows(alone, partial(on_gpu, gpu)):
                told.put(row)
        finally:
            told.put(None)

    alone, told = [each for each in wanted if each.gpus == 1], Queue()
    threads = [Thread(target=those_alone, args=(gpu, told)) for gpu in range(gpus)]
    for thread in threads:
        thread.start()
    for _ in threads:
        yield from iter(told.get, None)
    yield from rows([each for each in wanted if each.gpus > 1], lambda: Ranks(gpus))


_one_at_a_time = Lock()


def on_gpu(gpu: int) -> Ranks:
    """A process that sees this GPU alone."""
    from hybrid_megatron import platform

    with _one_at_a_time:
        before, here = os.environ.get("CUDA_VISIBLE_DEVICES"), platform.visible_devices()
        if here:
            os.environ["CUDA_VISIBLE_DEVICES"] = here[gpu]
        try:
            return Ranks(1)
        finally:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None) if before is None else os.environ.update(CUDA_VISIBLE_DEVICES=before)


def row_of(each: Measurement, group: Ranks) -> dict:
    same = {"model": each.model, "context": each.context, "layout": each.layout, "gpus": each.gpus, "failed": None}
    try:
        return group.run(each.gpus, measure_afresh, Cell(MODELS[each.model], each.context, overrides=each.words))[0] | same
    except AssertionError as error:
        return same | {"failed": str(error).strip().splitlines()[-1]}


def measure_afresh(cell: Cell) -> dict:
    """In a process that may have measured others: with its memory given back, and without what was compiled for other shapes."""
    import torch

    from hybrid_megatron import platform
    from hybrid_megatron.benchmarking.measure import measure

    platform.select_device()
    torch._dynamo.reset()  # it keeps a few shapes of a function, and runs any more of them uncompiled
    if platform.is_cuda():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return measure(cell, time.time())


def table(rows: list[dict]) -> str:
    from hybrid_megatron.benchmarking.table import aligned

    lines = [["model", "context", "layout", "batch", "recompute", "tok/s/GPU", "MFU", "GiB", "efficiency"]]
    alone = {(row["model"], row["context"]): row for row in rows if row["layout"] == "one GPU" and row["failed"] is None}
    for row in sorted(rows, key=lambda row: (row["context"], list(MODELS).index(row["model"]))):
        lines.append([row["model"], f"{row['context']:,}", row["layout"]])
        if row["failed"] is not None:
            lines[-1].append("failed")
            continue
        first = alone.get((row["model"], row["context"]))
        lines[-1] += [
            f"{row['micro_batches']} x {row['micro_batch']}",
            row["recompute"],
            f"{row['tokens_per_second_per_gpu']:,.0f}",
            "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
            f"{row['peak_memory_gib']:.1f}",
            f"{row['tokens_per_second_per_gpu'] / first['tokens_per_second_per_gpu']:.3f}" if first else "-",
        ]
    failed = [f"{row['model']} at {row['context']:,}, {row['layout']}: {row['failed']}" for row in rows if row["failed"] is not None]
    return "\n".join([aligned(lines), *failed])


if __name__ == "__main__":
    main()
