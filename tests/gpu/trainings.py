"""python -m tests.gpu.trainings RECIPES: train each list of recipe words in a JSON list, on the GPU or, with CUDA_VISIBLE_DEVICES="",
on the CPU. For environments that a process cannot change once it has begun."""

import json
import sys
from pathlib import Path


def train_all(recipes: list[list[str]]) -> list[Path]:
    """Train one after the other; returns the run folders."""
    from hybrid_megatron import platform
    from hybrid_megatron.config import load_recipe
    from hybrid_megatron.training.loop import train
    from hybrid_megatron.training.signals import StopRequest

    if platform.is_cuda():
        from tests.gpu.untuned import spare_autotuning

        spare_autotuning()
    folders = []
    for words in recipes:
        outcome = train(load_recipe(words), StopRequest())
        assert outcome.complete
        folders.append(outcome.run_dir)
    return folders


if __name__ == "__main__":
    train_all(json.loads(sys.argv[1]))
