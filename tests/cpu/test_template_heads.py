"""The figures in the heads of slurm/train_*.sbatch are the plan's, for the pattern that needs most."""

import re
from pathlib import Path

import pytest

from hybrid_megatron.config import load_recipe
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.planning.layout import Layout
from hybrid_megatron.planning.memory import GIB, peak_memory

ROOT = Path(__file__).parents[2]
NEEDIEST = "hypenet_kda"


def gib(gpus: int, recipe: str, *words: str) -> float:
    config = load_recipe([recipe, "data.train=unset", "init_from=null", *words])
    return peak_memory(Layout(config, plan_layers(config), gpus)) / GIB


@pytest.mark.parametrize("gpus", [8, 16])
def test_memory(gpus):
    def said(place: str) -> list[int]:
        """Whole numbers behind the last `#` of the line, those of sizes and GPUs aside."""
        [line] = [line for line in lines if place in line]
        words = line.rpartition("#")[2]
        return [int(number) for number in re.findall(r"\b\d+\b", re.sub(r"\b8 samples|\bH200", "", words))]

    def planned(stage: str, size: str, *layouts: tuple[str, ...]) -> list[int]:
        return [round(gib(gpus, f"{size}+{NEEDIEST}+{stage}", *layout)) for layout in layouts]

    lines = (ROOT / f"slurm/train_{gpus}xh200.sbatch").read_text().splitlines()
    two, four = ("parallel.context=2",), ("parallel.context=4",)
    assert said("layout=() #") == planned("pretrain_4k", "1b", ()) + planned("extend_32k", "1b", ())
    assert said("*3b*4k*)") == planned("pretrain_4k", "3b", ("train.micro_batch=4",), ())
    assert said("*3b*32k*)") == planned("extend_32k", "3b", two, (), four)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("3b", "pretrain_4k", "train.micro_batch=4"), ("3b", "extend_32k", "parallel.context=2")])
def test_no_pattern_needs_more(layout):
    size, stage, word = layout
    found = {path.stem: gib(8, f"{size}+{path.stem}+{stage}", word) for path in (ROOT / "recipes/patterns").glob("*.yaml")}
    assert max(found, key=found.get) == NEEDIEST
