"""torchrun --nproc-per-node N benchmarks/context_parallel.py [--contexts 32768,131072] [--mixers gdn,gla,lightning,attention,swa]
                                                               [--out DIR] [--add FILE] [MODEL]

One mixer layer (input projection, mixer, output projection; forward and backward) of a sample spread over N ranks, against the same layer
on each rank alone with the whole sample: milliseconds, bytes that the busiest rank receives from others in the forward pass, and the
scaling efficiency, alone / (N x spread). `host`: milliseconds until the last kernel was handed over; where that is nearly all, the host's
speed is measured and not the GPU's. Linear mixers by states and by all-to-all, attention without positions by gathered keys and values and
by all-to-all, windows by their halo. Contexts are tokens of a whole sample; besides those named, 32,768 a rank, if one of them is as long.
Without MODEL the layer is one of 776m in bf16; on a CPU add tiny, 776m+tiny.

--add  a context_parallel.json of the same model, contexts and kind of machine: its mixers stay, and only missing ones are measured

Writes context_parallel.json into --out ($OUT, or this folder), after each mixer.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

TIMES, WARM_UP = 10, 3
WAYS = {"swa": ("alone", "halo"), "attention": ("alone", "gather", "all_to_all")}
WAYS_OF_LINEAR = ("alone", "states", "all_to_all")


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("model", nargs="?", default="776m")
    parser.add_argument("--contexts", default="32768,131072")
    parser.add_argument("--mixers", default="gdn,gla,lightning,attention,swa")
    parser.add_argument("--add", type=Path)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "benchmarks")))
    settings = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        sys.exit("error: nothing is spread over one process: start it with torchrun --nproc-per-node N, N at least 2")
    contexts = contexts_of(settings.contexts, ranks)
    same = {"ranks": ranks, "model": settings.model, "contexts": contexts}
    earlier = json.loads(settings.add.read_text()) if settings.add and settings.add.exists() else same | {"rows": []}
    if differs := [name for name in same if earlier.get(name) != same[name]]:
        name = differs[0]
        sys.exit(f"error: --add {settings.add}: {name} there are {earlier.get(name, 'not told')}, and here {same[name]}; leave it out")
    settings.out.mkdir(parents=True, exist_ok=True)
    rows = earlier["rows"]
    done = {row["mixer"] for row in rows}
    for found in measured([mixer for mixer in settings.mixers.split(",") if mixer not in done], settings.model, contexts):
        rows += with_efficiency(found, ranks)
        if os.environ["RANK"] == "0":
            (settings.out / "context_parallel.json").write_text(json.dumps(same | {"rows": rows}, indent=1) + "\n")
    if os.environ["RANK"] == "0":
        print(table(rows, ranks))


def contexts_of(text: str, ranks: int) -> list[int]:
    """Those named and, if one of them is as long, 32,768 tokens a rank."""
    if not all(part.isdigit() and int(part) > 0 and int(part) % (2 * ranks) == 0 for part in text.split(",")):
        sys.exit(f"error: --contexts {text}: multiples of {2 * ranks} are needed, two chunks for each of {ranks} ranks")
    named = {int(part) for part in text.split(",")}
    return sorted(named | {32_768 * ranks} if max(named) >= 32_768 else named)


def measured(mixers: list[str], model: str, contexts: list[int]) -> Iterator[list[dict]]:
    """The rows of one mixer after the other."""
    from hybrid_megatron import platform
    from hybrid_megatron.benchmarking.cells import load_for_bench
    from hybrid_megatron.model.hybrid_model import build_model
    from hybrid_megatron.model.kernels import check_kernels
    from hybrid_megatron.model.pattern import plan_layers
    from hybrid_megatron.parallel import SequenceLayout, start

    platform.select_device()
    spread = f"parallel.context={os.environ['WORLD_SIZE']}"

    def config_of(mixer: str, way: str):
        ways = [spread]
        if way == "all_to_all":
            ways.append(f"parallel.context_{'attention' if mixer == 'attention' else 'linear'}=all_to_all")
        position = ", position: nope" if mixer == "attention" else ""
        one_layer = [f"pattern=[{{mixer: {mixer}{position}}}]", "model.num_layers=1", "model.vocab_size=1024"]
        return load_for_bench(model, (*one_layer, *ways))

    with start(config_of("gdn", "alone").parallel, seed=1) as state:
        for mixer in mixers:
            rows = []
            for way in WAYS.get(mixer, WAYS_OF_LINEAR):
                config = config_of(mixer, way)
                check_kernels(config, plan_layers(config))
                layer = build_model(config, plan_layers(config), state).decoder.layers[0].self_attention
                for context in contexts:
                    ranks = 1 if way == "alone" else config.parallel.context
                    told = state.of_all_ranks(time_layer(layer, config, SequenceLayout(context, ranks, state.groups.cp.rank() % ranks)))
                    most = {name: max(each[name] for each in told) for name in told[0]}
                    rows.append({"mixer": mixer, "way": way, "context": context, **most})
                    if state.rank == 0:
                        print(rows[-1], file=sys.stderr, flush=True)
            yield rows


def time_layer(layer, config, layout) -> dict:
    """Median of a forward and a backward pass of the layer on this rank's share of one sample."""
    import torch

    from hybrid_megatron import platform
    from hybrid_megatron.config.megatron import parameter_dtype
    from tests.cpu.traffic import counted

    hidden = torch.randn(layout.local_length, 1, config.model.hidden_size, dtype=parameter_dtype(config), device=platform.device())
    hidden.requires_grad_()

    def once() -> tuple[float, float]:
        """Milliseconds until all is done, and until all is handed over."""
        platform.synchronize()
        torch.distributed.barrier()
        began = time.perf_counter()
        out, _ = layer(hidden, packed_seq_params=layout)
        out.backward(torch.ones_like(out))
        handed_over = time.perf_counter()
        platform.synchronize()
        return 1e3 * (time.perf_counter() - began), 1e3 * (handed_over - began)

    with counted() as traffic, torch.no_grad():
        layer(hidden, packed_seq_params=layout)
    for _ in range(WARM_UP):
        once()
    whole, host = (statistics.median(times) for times in zip(*(once() for _ in range(TIMES))))
    return {"milliseconds": whole, "host_milliseconds": host, "received_bytes": traffic.received}


def with_efficiency(rows: list[dict], ranks: int) -> list[dict]:
    alone = {(row["mixer"], row["context"]): row["milliseconds"] for row in rows if row["way"] == "alone"}
    return [
        row | {"efficiency": alone[row["mixer"], row["context"]] / (row["milliseconds"] * (1 if row["way"] == "alone" else ranks))}
        for row in rows
    ]


def table(rows: list[dict], ranks: int) -> str:
    from hybrid_megatron.benchmarking.table import aligned

    head = ["mixer", "context", f"over {ranks} ranks", "ms", "host", "MB received", "efficiency"]
    return aligned([
        head,
        *(
            [row["mixer"], f"{row['context']:,}", row["way"], f"{row['milliseconds']:.2f}", f"{row['host_milliseconds']:.2f}",
             f"{row['received_bytes'] / 1e6:.2f}",
             f"{row['efficiency']:.2f}"]
            for row in sorted(rows, key=lambda row: (row["mixer"], row["context"]))
        ),
    ])  # fmt: skip


if __name__ == "__main__":
    main()
