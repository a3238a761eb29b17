"""What a run writes down is true: names, tokens, speed, validation, and which checkpoints stay."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hybrid_megatron.checkpoint.store import read_progress
from hybrid_megatron.config import load_recipe
from hybrid_megatron.data import open_dataset
from hybrid_megatron.model.accounting import account
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.parallel import start
from hybrid_megatron.training.build import build_trainer
from hybrid_megatron.training.step import validation_loss
from tests.cpu import cells
from tests.cpu.reference_model import reference_loss
from tests.cpu.runs import checkpoints, train
from tests.cpu.tiny import tiny_config, tiny_words

NAMES = {
    "step", "loss", "lm_loss", "grad_norm", "lr", "tokens", "tokens_per_second_per_gpu", "model_tflops_per_gpu",
    "peak_memory_gib", "step_seconds", "data_seconds",
}  # fmt: skip


@dataclass
class Done:
    run: Path
    metrics: list[dict]


@pytest.fixture(scope="module", params=[1, 2])
def done(request, ranks, tiny_data, tmp_path_factory) -> tuple[int, Done]:
    run = tmp_path_factory.mktemp("metrics") / "run"
    more = ["checkpoint.interval_steps=2", "checkpoint.keep_last=3", "validation.interval_steps=4", "train.tokens=5120"]
    assert train(ranks, request.param, tiny_words(tiny_data, f"run_dir={run}", *more)).code == 0
    return request.param, Done(run, cells.run_folder_metrics(run))


def test_names(done):
    _, run = done
    assert any(line.get("checkpoint_stall_seconds", 0) > 0 for line in run.metrics), "of steps after a save"
    for line in run.metrics:
        measured = {"validation_loss"} if line["step"] % 4 == 0 or line["step"] == 10 else set()
        assert line.keys() - {"checkpoint_stall_seconds"} == NAMES | measured, "and no mfu: the peak of a CPU is not known"


def test_values_are_true(done, tiny_data):
    processes, run = done
    config = tiny_config(tiny_data, "run_dir=unused")
    flops = account(config, plan_layers(config)).flops_per_token
    for line in run.metrics:
        assert line["tokens"] == 512 * line["step"]
        assert line["tokens_per_second_per_gpu"] == pytest.approx(512 / line["step_seconds"] / processes, rel=1e-9)
        assert line["model_tflops_per_gpu"] == pytest.approx(line["tokens_per_second_per_gpu"] * flops / 1e12, rel=1e-9)
        assert 0 <= line["data_seconds"] < line["step_seconds"]
        assert 0.1 < line["peak_memory_gib"] < 10
        assert line["loss"] == pytest.approx(line["lm_loss"], abs=1e-5), "no token weights"


def test_tokens_and_speed_of_a_growing_batch(ranks, tiny_data, tmp_path):
    """Of two samples a rank in the first step; validation, checkpoints and what is said count tokens too."""
    run = tmp_path / "run"
    grows = ["schedule.start_batch_tokens=256", "schedule.batch_warmup_tokens=600", "schedule.warmup_tokens=1500", "train.tokens=2048"]
    ended = train(ranks, 2, tiny_words(tiny_data, f"run_dir={run}", *grows, "validation.interval_steps=100"))
    lines = cells.run_folder_metrics(run)
    assert ended.code == 0 and [line["tokens"] for line in lines] == [256, 512, 768, 1280, 1792, 2304]
    before = 0
    for line in lines:
        rate = (line["tokens"] - before) / line["step_seconds"] / 2
        assert line["tokens_per_second_per_gpu"] == pytest.approx(rate, rel=1e-9)
        before = line["tokens"]
    assert [line["lr"] for line in lines[:4]] == pytest.approx([3e-3 * tokens / 1500 for tokens in (256, 512, 768, 1280)], rel=1e-12)
    assert lines[-1]["lr"] == 0 and "validation_loss" in lines[-1]
    assert read_progress(run / "checkpoints/step_00000006").tokens == 2304
    assert "growing from 256 tokens in steps of that over the first 600, full from step 4 on" in ended.out
    assert (
        "steps      6 for 2,048 tokens, the first 1,500 of them warm-up to a learning rate of 3.00e-03, then cosine to 0.00e+00"
        in ended.out
    )


def test_retention(done):
    _, run = done
    assert checkpoints(run.run) == ["step_00000006", "step_00000008", "step_00000010"]


def measured(words: list[str]) -> float:
    """The validation loss of an untrained model."""
    config = load_recipe(words)
    train_data, valid_data = (open_dataset(config, split) for split in ("train", "valid"))
    with start(config.parallel, config.seed) as state:
        trainer = build_trainer(config, state, train_data, valid_data)
        return validation_loss(config, trainer.model, trainer.valid_stream, state)


@pytest.fixture(scope="module")
def true_validation_loss(ranks, tiny_data) -> float:
    """Over the first nine samples, by the definition of the model."""
    words = tiny_words(tiny_data, "run_dir=unused")
    [(_, shards, _)] = ranks.run(1, cells.loss_and_gradients, words)
    config = load_recipe(words)
    samples = [open_dataset(config, "valid").samples[i] for i in range(9)]
    tokens, targets = (torch.stack([sample[key] for sample in samples]) for key in ("tokens", "labels"))
    return float(reference_loss(config, cells.assemble([shards]), tokens, targets))


@pytest.mark.parametrize(
    "size, layout",
    [
        (1, ["train.micro_batch=1"]),
        (1, ["train.micro_batch=8"]),
        (2, ["train.micro_batch=2"]),
        (2, ["parallel.pipeline=2"]),
        (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
        pytest.param(4, ["parallel.context=2"], marks=pytest.mark.slow),
    ],
)
def test_validation_measures_the_same_samples_under_every_layout(ranks, tiny_data, true_validation_loss, size, layout):
    """Nine samples: no micro-batch and no number of ranks divides them."""
    for found in ranks.run(size, measured, tiny_words(tiny_data, "run_dir=unused", *layout)):
        assert abs(found - true_validation_loss) <= 1e-5


def test_no_more_validation_samples_than_there_are(ranks, tiny_data):
    config = tiny_config(tiny_data, "run_dir=unused")
    count = len(open_dataset(config, "valid"))
    words = tiny_words(tiny_data, "run_dir=unused")
    [all_there] = ranks.run(1, measured, [*words, f"validation.samples={count}"])
    [asked_for_more] = ranks.run(1, measured, [*words, "validation.samples=100000"])
    assert asked_for_more == all_there
