"""No recipe has become slower beside what one would use instead: ratios of tokens per second within one run, against those that were
recorded on the same kind of GPU (benchmarks/ratios.json). A minute or two for each recipe; on another GPU there is nothing to compare with.
"""

import json
from pathlib import Path

import pytest
import torch

from hybrid_megatron.benchmarking.cells import Cell
from hybrid_megatron.benchmarking.run_cell import run_cell

RECORDED = json.loads((Path(__file__).parents[2] / "benchmarks/ratios.json").read_text())
MOST_LOST = 0.05
"""Of a recorded ratio; runs of one machine differ by 1%, machines of a kind by 2%."""


@pytest.mark.parametrize("recipe, context, peer, recorded", [tuple(each.values()) for each in RECORDED["ratios"]])
def test_ratio_to_a_peer(tmp_path, recipe, context, peer, recorded):
    if torch.cuda.get_device_name() != RECORDED["device"]:
        pytest.skip(f"recorded on {RECORDED['device']}")
    rows = [run_cell(Cell(recipe, context, name, recipe), 1, tmp_path) for name in (None, peer)]
    assert not any(row["failed"] for row in rows), [row["failed"] for row in rows]
    mine, theirs = (row["tokens_per_second_per_gpu"] for row in rows)
    print(f"{recipe} at {context:,} over {peer}: {mine:,.0f} / {theirs:,.0f} = {mine / theirs:.3f}, recorded {recorded:.3f}")
    assert mine / theirs >= (1 - MOST_LOST) * recorded
