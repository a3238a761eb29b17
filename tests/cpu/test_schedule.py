"""The learning rate by its closed form, alone and as a run logs it."""

import math

import pytest

from hybrid_megatron.training.schedule import learning_rate
from tests.cpu.runs import computed, train
from tests.cpu.tiny import tiny_config, tiny_words

# 20 steps of 512 tokens, 4 of them warm-up
SCHEDULE = ["optimizer.peak_lr=1e-2", "schedule.warmup_tokens=2048", "schedule.min_lr=1e-4"]


def test_warm_up_peak_middle_and_end(tiny_data):
    config = tiny_config(tiny_data, "run_dir=unused", *SCHEDULE)
    rates = [learning_rate(config, step) for step in range(20)]
    assert rates[:4] == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2], rel=1e-15)
    assert max(rates) == rates[3]
    assert rates[11] == pytest.approx((1e-2 + 1e-4) / 2, rel=1e-12), "half of the cosine's tokens: half way down"
    assert rates[7] == pytest.approx(1e-4 + 9.9e-3 * (0.5 + math.sqrt(0.125)), rel=1e-12), "a quarter: cos(pi/4)"
    assert rates[19] == pytest.approx(1e-4, rel=1e-12)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_without_warm_up_it_begins_below_the_peak(tiny_data):
    config = tiny_config(tiny_data, "run_dir=unused", "schedule.warmup_tokens=0", "optimizer.peak_lr=1e-2")
    assert learning_rate(config, 0) == pytest.approx(5e-3 * (1 + math.cos(math.pi / 20)), rel=1e-12)
    assert learning_rate(config, 19) == 0


def test_a_budget_that_is_no_multiple_of_the_batch_ends_at_the_end(tiny_data):
    config = tiny_config(tiny_data, "run_dir=unused", "train.tokens=10000")
    assert config.num_steps == 20 and learning_rate(config, 19) == 0


def test_a_run_logs_and_uses_it(ranks, tiny_data, tmp_path):
    run = tmp_path / "run"
    assert train(ranks, 1, tiny_words(tiny_data, f"run_dir={run}", *SCHEDULE, "train.tokens=4096")).code == 0
    config = tiny_config(tiny_data, "run_dir=unused", *SCHEDULE, "train.tokens=4096")
    assert [line["lr"] for line in computed(run)] == [learning_rate(config, step) for step in range(8)]
