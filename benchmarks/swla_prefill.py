"""python benchmarks/swla_prefill.py [--mixers gla,gdn,kda,lightning] [--tokens 65536] [--window 4096] [--stride 1024] [--out DIR]

Prefill by sliding-window linear attention: milliseconds of the form by strides (ops/swla.py), which evaluation takes, and of the published
form, overlapping windows each from nothing, by the same kernels: all windows at once as samples of a batch, and one window after the other.
12 heads of 128 in bf16, no gradients, medians of ten on a GPU; on a CPU e.g. --tokens 512 --window 128 --stride 32.

Writes swla_prefill.json into --out ($OUT, or this folder).
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

HEADS, WIDTH = 12, 128
TIMES, WARM_UP = 10, 3
SCALE = WIDTH**-0.5


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--mixers", default="gla,gdn,kda,lightning")
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--stride", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "benchmarks")))
    settings = parser.parse_args()
    rows = [row_of(mixer, settings) for mixer in settings.mixers.split(",")]
    (settings.out / "swla_prefill.json").write_text(json.dumps({"settings": vars(settings) | {"out": None}, "rows": rows}, indent=1) + "\n")
    from hybrid_megatron.benchmarking.table import aligned

    head = ["mixer", "by strides, ms", "windows at once, ms", "times", "one by one, ms", "times"]
    print(aligned([head, *(
        [row["mixer"], f"{row['strides']:.2f}", f"{row['at_once']:.2f}", f"{row['at_once'] / row['strides']:.2f}",
         f"{row['one_by_one']:.2f}", f"{row['one_by_one'] / row['strides']:.2f}"]
        for row in rows
    )]))  # fmt: skip


def row_of(mixer: str, settings: argparse.Namespace) -> dict:
    """Milliseconds of each form, and how far the first is from the second, relative to its norm."""
    import torch

    from hybrid_megatron import platform
    from hybrid_megatron.ops.kernel_check import example
    from hybrid_megatron.ops.swla import overlapped_windows, sliding_window
    from hybrid_megatron.ops.tuned_kernels import use_tuned_kernels

    if platform.is_cuda():
        use_tuned_kernels(platform.device_name())
    rule, inputs = example(mixer, HEADS, WIDTH, torch.bfloat16, platform.device(), tokens=settings.tokens)
    sizes = {"scale": SCALE, "window": settings.window, "stride": settings.stride}
    forms = {
        "strides": partial(sliding_window, rule, inputs, **sizes),
        "at_once": partial(windows_at_once, rule, inputs, settings.window, settings.stride),
        "one_by_one": partial(overlapped_windows, rule, inputs, **sizes),
    }
    with torch.no_grad():
        mine, published = (forms[name]().double() for name in ("strides", "at_once"))
        return {"mixer": mixer, "difference": float((mine - published).norm() / published.norm())} | {
            name: milliseconds(form) for name, form in forms.items()
        }


def windows_at_once(rule, inputs, window: int, stride: int):
    """The published form, its windows as samples of one batch: all outputs of the first, of each other one its last stride."""
    import torch

    windows = tuple(
        x[0].unfold(0, window, stride).movedim(-1, 1).contiguous() for x in inputs
    )  # fmt: skip
    o, _ = rule.run(windows, scale=SCALE)
    return torch.cat((o[0], o[1:, -stride:].flatten(0, 1)))[None]


def milliseconds(run: Callable[[], object]) -> float:
    from hybrid_megatron import platform

    def once() -> float:
        platform.synchronize()
        began = time.perf_counter()
        run()
        platform.synchronize()
        return 1e3 * (time.perf_counter() - began)

    for _ in range(WARM_UP):
        once()
    return statistics.median(once() for _ in range(TIMES))


if __name__ == "__main__":
    main()
