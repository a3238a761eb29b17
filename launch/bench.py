"""python -m launch bench [RECIPE ...] [section.key=value ...] [--contexts 4096,32768] [--peers] [--profile] [--rounds 3] [--gpus N]
                        [--at-once N] [--out DIR]

How fast recipes train: whole training steps on random tokens, each recipe at each context in a process of its own. Without RECIPE, nine
patterns of 776m at 4,096 and 32,768 tokens a sample, about a minute each on one GPU; a RECIPE is measured at its own context unless
--contexts says others. A micro-batch has as many tokens as the recipe's own, fewer or with recomputation where memory is short;
train.micro_batch=N fixes it. On a CPU, in half a minute:

    python -m launch bench 776m+rope+tiny 776m+gdn_nope_lh+tiny --contexts 128,256

--peers    beside each model size what one would use instead: Hugging Face's Llama, compiled, and where a recipe has gdn, gla, kda or rwkv7,
           FLA's own models; the table gets the ratios. On one GPU.
--profile  where a step's time goes: kernels by kind, gaps between them, how often the host waits for the device
--rounds   measure everything so many times; figures and ratios are medians, ratios are taken within a round
--gpus     run on N GPUs, through torchrun; parallel.tensor=2 and the like say how, the rest is data parallel
--at-once  so many measurements side by side, each on GPUs of its own, where a machine has several times --gpus: rows come N times as
           fast, but share the host, and ratios compare one GPU with another
--out      the folder of results, runs/bench/DATE_TIME unless said: bench.csv (the table), bench.json (everything; keys in
           hybrid_megatron/benchmarking/measure.py, results.py, profile.py), pictures, logs

What fails has its reason in the table, and the rest goes on; exit code 2 if nothing could be measured.
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hybrid_megatron.benchmarking.cells import CONTEXTS, RECIPES, Cell, make_cells
from hybrid_megatron.benchmarking.plots import plot_results
from hybrid_megatron.benchmarking.results import summarise, write_results
from hybrid_megatron.benchmarking.run_cell import run_cell, run_side_by_side
from hybrid_megatron.benchmarking.table import table
from hybrid_megatron.errors import ConfigError, RunError, exit_with_code_2
from launch.words import help_if_asked, split_options, whole_numbers

_WITH_VALUE = ("--contexts", "--rounds", "--gpus", "--at-once", "--out")
_ALONE = ("--peers", "--profile")


def main(words: list[str]) -> None:
    help_if_asked(__doc__, words, needs_words=False)
    with exit_with_code_2():
        if "WORLD_SIZE" in os.environ:
            raise ConfigError("bench starts torchrun itself: run python -m launch bench ... --gpus N, without torchrun before it")
        plain, options = split_options("bench", words, _WITH_VALUE, _ALONE)
        gpus = _number("--gpus", options.get("--gpus", "1"))
        if gpus > 1 and "--peers" in options:
            raise ConfigError("--peers: they run on one GPU; leave out --gpus")
        cells = _cells(plain, options)
        groups = _groups_of_gpus(gpus, _number("--at-once", options.get("--at-once", "1")))
        folder = Path(options.get("--out") or time.strftime("runs/bench/%Y-%m-%d_%H-%M-%S"))
        _make(folder)
        rows: dict[int, dict] = {}
        for place, row in _measured(cells, gpus, folder / "logs", groups):
            rows[place] = row
            found = [rows[place] for place in sorted(rows)]
            write_results(found, words, folder)  # what is measured stays, whatever happens later
        lines = summarise(found)
        pictures = plot_results(lines, folder)
        print(f"\n{table(lines)}\n\n{folder}: bench.csv, bench.json{''.join(f', {path.name}' for path in pictures)}", flush=True)
        if all(row["failed"] for row in found):
            raise RunError("nothing could be measured; the table says why")


def _cells(plain: list[str], options: dict[str, str]) -> list[Cell]:
    recipes = list(dict.fromkeys(word for word in plain if "=" not in word))
    overrides = tuple(word for word in plain if "=" in word)
    contexts = _numbers("--contexts", options["--contexts"], "4096,32768") if "--contexts" in options else None
    if not recipes:
        _refuse_a_cpu()
        recipes, contexts = list(RECIPES), contexts or list(CONTEXTS)
    rounds = _number("--rounds", options.get("--rounds", "1"))
    return make_cells(recipes, contexts, rounds, "--peers" in options, overrides=overrides, profile="--profile" in options)


def _refuse_a_cpu() -> None:
    from hybrid_megatron import platform  # imports torch

    if not platform.is_cuda():
        raise ConfigError(
            "torch sees no GPU here, and 776m would take hours on a CPU; name a small recipe: "
            "python -m launch bench 776m+rope+tiny 776m+gdn_nope_lh+tiny --contexts 128,256"
        )


def _groups_of_gpus(gpus: int, at_once: int) -> list[str]:
    """For each of the measurements that run side by side the GPUs that it sees; empty where they run one by one and see all."""
    if at_once == 1:
        return []
    from hybrid_megatron import platform  # imports torch

    here = platform.visible_devices()
    if len(here) < gpus * at_once:
        raise ConfigError(
            f"--at-once {at_once}: it needs {gpus * at_once} GPUs, and torch sees {len(here) or 'none'} here; leave it out or name a "
            "smaller number"
        )
    return [",".join(here[i * gpus : (i + 1) * gpus]) for i in range(at_once)]


def _measured(cells: list[Cell], gpus: int, logs: Path, groups: list[str]) -> Iterator[tuple[int, dict]]:
    """(place in `cells`, row), told on the screen: one after the other, or as they end."""
    width = max(len(cell.name) for cell in cells)

    def head(place: int) -> str:
        return f"{place + 1:>3} of {len(cells)}  {cells[place].name:<{width}}  {cells[place].context:>7,}  "

    def one_by_one() -> Iterator[tuple[int, dict]]:
        for place, cell in enumerate(cells):
            print(head(place), end="", flush=True)
            yield place, run_cell(cell, gpus, logs)

    for place, row in run_side_by_side(cells, gpus, logs, groups) if groups else one_by_one():
        told = row["failed"] or f"{row['tokens_per_second_per_gpu']:>9,.0f} tokens/s/GPU  {row['peak_memory_gib']:6.1f} GiB"
        print((head(place) if groups else "") + told, flush=True)
        yield place, row


def _make(folder: Path) -> None:
    if (folder / "bench.json").exists():
        raise ConfigError(f"--out {folder}: it holds results already; name another folder")
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: it cannot be made ({error.strerror})") from None


def _numbers(option: str, text: str, example: str) -> list[int]:
    return whole_numbers(option, text, f"whole numbers above 0 are needed, e.g. {option} {example}")


def _number(option: str, text: str) -> int:
    numbers = _numbers(option, text, "2")
    if len(numbers) != 1:
        raise ConfigError(f"{option} {text}: it must be one whole number above 0")
    return numbers[0]


if __name__ == "__main__":
    main(sys.argv[1:])
