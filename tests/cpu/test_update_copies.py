"""Where the update on CUDA writes bfloat16 parameters (training/optimizer.py): all ranks together into every one, once, also behind a
checkpoint that has been loaded. A CPU has no such kernel; what it is given can be looked at here."""

import pytest
import torch

from hybrid_megatron.checkpoint.choose import newest_whole
from hybrid_megatron.checkpoint.load import load_checkpoint
from hybrid_megatron.checkpoint.store import CheckpointStore
from hybrid_megatron.config import load_recipe
from hybrid_megatron.data import open_dataset
from hybrid_megatron.parallel import start
from hybrid_megatron.training.build import build_trainer
from hybrid_megatron.training.optimizer import _copy_with_the_update
from tests.cpu.runs import train
from tests.cpu.tiny import tiny_words


def written(words: list[str]) -> tuple[int, int, int]:
    """(elements of this rank's copies, how many elements of bfloat16 parameters change when they do, elements of those parameters)."""
    config = load_recipe(words)
    with start(config.parallel, config.seed) as state:
        trainer = build_trainer(config, state, open_dataset(config, "train"), None)
        parts = trainer.optimizer.chained_optimizers
        for part in parts:
            _copy_with_the_update(part)
        load_checkpoint(newest_whole(CheckpointStore(config.run_dir), state), trainer.model, trainer.optimizer, state)
        parameters = [p for chunk in trainer.model for p in chunk.parameters() if p.dtype is torch.bfloat16]
        before = [p.detach().clone() for p in parameters]
        count = 0
        for part in parts:
            copies = part.optimizer.copies
            held = [p for group in part.optimizer.param_groups for p in group["params"]]
            assert len(held) == len(copies) and all(p in copies for p in held)
            for master in held:
                assert (copies[master] is None) == any(master is own for group in part.shard_fp32_groups for own in group)
                if copies[master] is not None:
                    assert torch.equal(copies[master], master.bfloat16())
                    copies[master].add_(1)
                    count += master.numel()
        changed = sum(int((p != old).sum()) for p, old in zip(parameters, before))
        return count, changed, sum(p.numel() for p in parameters)


@pytest.mark.parametrize("size", [1, 2])
def test_every_parameter_is_written_once(ranks, tiny_data, tmp_path, size):
    words = tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}", "train.precision=bf16", "train.tokens=2048", "checkpoint.interval_steps=2")
    assert train(ranks, size, words).code == 0
    answers = ranks.run(size, written, words)
    assert all(count == changed > 0 for count, changed, _ in answers)
    assert sum(count for count, _, _ in answers) == answers[0][2]
