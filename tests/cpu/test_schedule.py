"""Learning rate and batch by their closed forms, alone and as a run logs them."""

import math

import pytest

from hybrid_megatron.config.batch_plan import batch_plan
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


SHAPES = {
    # shape: (more settings, rates of steps 4 (after the warm-up), 11 (middle of what follows it), 18 and 19 (the last))
    "linear": ([], [1e-2 - 9.9e-3 / 16, 5.05e-3, 1e-4 + 9.9e-3 / 16, 1e-4]),
    "constant": (["schedule.min_lr=0"], [1e-2, 1e-2, 1e-2, 1e-2]),
    "wsd": (["schedule.decay_tokens=2048"], [1e-2, 1e-2, 1e-4 + 9.9e-3 / 4, 1e-4]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_other_shapes(tiny_data, shape):
    more, expected = SHAPES[shape]
    config = tiny_config(tiny_data, "run_dir=unused", *SCHEDULE, f"schedule.shape={shape}", *more)
    rates = [learning_rate(config, step) for step in range(20)]
    assert rates[:4] == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2], rel=1e-15), "the warm-up is the same for all"
    assert [rates[step] for step in (4, 11, 18, 19)] == pytest.approx(expected, rel=1e-12)
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_wsd_is_stable_up_to_its_decay_and_linear_if_that_is_all(tiny_data):
    wsd = [*SCHEDULE, "schedule.shape=wsd"]
    config = tiny_config(tiny_data, "run_dir=unused", *wsd, "schedule.decay_tokens=2000")
    rates = [learning_rate(config, step) for step in range(20)]
    assert rates[3:16] == [1e-2] * 13, "step 16 ends 464 tokens into the decay, which no step begins with"
    assert rates[16:] == pytest.approx([1e-4 + 9.9e-3 * left / 2000 for left in (1536, 1024, 512, 0)], rel=1e-12)

    all_of_it = tiny_config(tiny_data, "run_dir=unused", *wsd, "schedule.decay_tokens=8192")
    linear = tiny_config(tiny_data, "run_dir=unused", *SCHEDULE, "schedule.shape=linear")
    assert [learning_rate(all_of_it, step) for step in range(20)] == [learning_rate(linear, step) for step in range(20)]


@pytest.mark.parametrize("shape", ["linear", "constant", "wsd"])
def test_other_shapes_without_warm_up(tiny_data, shape):
    more = ["schedule.decay_tokens=10240"] if shape == "wsd" else []
    words = ["optimizer.peak_lr=1e-2", "schedule.warmup_tokens=0", f"schedule.shape={shape}", *more]
    config = tiny_config(tiny_data, "run_dir=unused", *words)
    first, last = (1e-2, 1e-2) if shape == "constant" else (9.5e-3, 0)
    assert (learning_rate(config, 0), learning_rate(config, 19)) == pytest.approx((first, last), rel=1e-12)


def batches_by_definition(tokens: int, full: int, start: int, warmup: int) -> list[int]:
    """Tokens of every step, one after the other."""
    batches, seen = [], 0
    while seen < tokens:
        batches.append(min(full, start * (1 + (full // start - 1) * seen // warmup)))
        seen += batches[-1]
    return batches


@pytest.mark.parametrize(
    "tokens, full, start, warmup",
    [
        (10_240, 512, 128, 2_048),
        (10_000, 512, 128, 1_000),  # neither is a multiple of anything
        (10_240, 512, 256, 1),  # the second step is full
        (10_240, 1_024, 64, 1_500),  # sizes are passed over
        (10_240, 512, 128, 10_239),  # full in no step
        (1, 512, 512, 0),  # not even a step
        (10_000, 512, 512, 0),  # does not grow
        (3 * 2**20, 2**18, 2**12, 10**6),
    ],
)
def test_batches_grow_by_the_rule(tokens, full, start, warmup):
    plan = batch_plan(tokens, 64, full, start if warmup else None, warmup)
    batches = batches_by_definition(tokens, full, start, warmup) if warmup else [full] * -(-tokens // full)
    assert plan.num_steps == len(batches) and plan.total_tokens == sum(batches) >= tokens
    seen = 0
    for step, batch in enumerate(batches):
        assert plan.batch_tokens(step) == batch and plan.tokens(step) == seen
        assert plan.samples(step) == range(seen // 64, (seen + batch) // 64)
        assert batch % start == 0 or not warmup
        seen += batch


def test_batches_by_hand():
    """A quarter, then half, then three quarters of the batch, each over a third of 3,072 tokens."""
    plan = batch_plan(6_144, 64, 512, 128, 3_072)
    assert [plan.batch_tokens(step) for step in range(plan.num_steps)] == [128] * 8 + [256] * 4 + [384] * 3 + [512] * 6
    assert plan.samples(12) == range(32, 38)
    assert [plan.steps_within(tokens) for tokens in (0, 127, 128, 2_048, 2_100, 6_271, 6_272, 10**9)] == [0, 0, 1, 12, 12, 20, 21, 21]


def test_rates_over_a_growing_batch(tiny_data):
    """By tokens, whatever the steps are: of 128, 256 and 384 tokens, and 512 from 2,176 tokens on."""
    grows = ["schedule.start_batch_tokens=128", "schedule.batch_warmup_tokens=2048"]
    config = tiny_config(tiny_data, "run_dir=unused", *SCHEDULE, *grows, "schedule.shape=linear")
    plan = config.batch_plan
    seen = [plan.tokens(step + 1) for step in range(plan.num_steps)]
    assert seen[:12] == [128, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1920, 2304, 2816]
    rates = [learning_rate(config, step) for step in range(plan.num_steps)]
    assert plan.total_tokens == 10_496 and rates[-1] == pytest.approx(1e-4, rel=1e-12)
    expected = [1e-2 * t / 2048 if t <= 2048 else 1e-4 + 9.9e-3 * (10_496 - t) / (10_496 - 2048) for t in seen]
    assert rates == pytest.approx(expected, rel=1e-12)


def test_a_run_logs_and_uses_it(ranks, tiny_data, tmp_path):
    run = tmp_path / "run"
    assert train(ranks, 1, tiny_words(tiny_data, f"run_dir={run}", *SCHEDULE, "train.tokens=4096")).code == 0
    config = tiny_config(tiny_data, "run_dir=unused", *SCHEDULE, "train.tokens=4096")
    assert [line["lr"] for line in computed(run)] == [learning_rate(config, step) for step in range(8)]
