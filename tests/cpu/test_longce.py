"""LongCE against a double loop over samples and windows in float64, and under every layout against one process.

Parameters are drawn wider than for training, so that the losses of the untrained model depend on the context: some weights are far from 1.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from hybrid_megatron.config import load_recipe
from hybrid_megatron.config.validate import validate
from hybrid_megatron.errors import ConfigError
from hybrid_megatron.ops.longce import Windows, longce_weights
from tests.cpu import cells, longce_cells
from tests.cpu.quick import quick_and_slow
from tests.cpu.reference_model import reference_losses
from tests.cpu.runs import computed, train
from tests.cpu.test_optimizer import one_step
from tests.cpu.test_parity import LAYOUTS, MASKS, check_gradients, first_batch
from tests.cpu.test_resume import check_bitwise, in_two_parts, straight
from tests.cpu.tiny import tiny_config, tiny_words
from tests.cpu.zoo import MIXED

GAMMA = 1.1
WIDE = ["model.init_std=0.1"]


def longce(window: int = 16, stride: int = 8, gamma: float = GAMMA) -> list[str]:
    return ["longce.enabled=true", f"longce.window={window}", f"longce.stride={stride}", f"longce.gamma={gamma}"]


@dataclass
class Definition:
    """One step of LongCE by its definition."""

    short: torch.Tensor
    """[samples, context] cross entropy with the short context; that of the whole one where there is no shorter."""
    weights: torch.Tensor
    loss: float
    lm_loss: float
    gradients: dict[str, torch.Tensor]


def define(config, parameters: dict[str, torch.Tensor]) -> Definition:
    """Every sample by itself, every window by itself, the first one included."""
    tokens, targets, starts = first_batch(config)
    context, window, stride = config.train.context, config.longce.window, config.longce.stride
    leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    losses = reference_losses(config, leaves, tokens, targets, starts)
    short = losses.detach().clone()
    with torch.no_grad():
        for sample in range(len(tokens)):
            for begin in range(0, context - window, stride):
                end = min(begin + window + stride, context)
                inside = None
                if starts is not None:
                    inside = starts[sample : sample + 1, begin:end].clone()
                    inside[0, 0] = True
                here = [x[sample : sample + 1, begin:end] for x in (tokens, targets)]
                short[sample, begin + window : end] = reference_losses(config, leaves, *here, inside)[0, window:]
    weights = (short - losses.detach()).exp().clamp(max=config.longce.gamma)
    weights[:, :window] = 1
    loss = (weights * losses).mean()
    loss.backward()
    return Definition(short, weights, loss.item(), losses.mean().item(), {name: leaf.grad for name, leaf in leaves.items()})


# (K, d, further words). With 16 + 24 tokens a sample has one window and three pass at once: eight are filled up to nine.
CASES = {
    "K 16, d 8": (16, 8, []),
    "K 40, d 8": (40, 8, []),
    "K 16, d 24": (16, 24, []),
    "documents": (16, 8, MASKS["documents"]),
    "micro-batch 8, documents": (16, 8, ["train.micro_batch=8", *MASKS["documents"]]),
    "all mixers, documents": (8, 8, [*MIXED["all mixers, HH"], *MASKS["documents"]]),
}


CASES_MORE = {
    "K 4, d 4": (4, 4, []),
    "micro-batch 1": (16, 8, ["train.micro_batch=1"]),
}


@pytest.mark.parametrize("case", quick_and_slow(CASES, CASES_MORE))
def test_one_process_computes_the_definition(ranks, tiny_data, case):
    window, stride, more = (CASES | CASES_MORE)[case]
    words = tiny_words(tiny_data, "run_dir=unused", *longce(window, stride), *WIDE, *more)
    [(losses, parameters, gradients)] = ranks.run(1, cells.losses_and_gradients, words)
    [(_, _, short)] = ranks.run(1, longce_cells.short_losses_of, words)
    config = load_recipe(words)
    expected = define(config, cells.assemble([parameters]))
    assert bool(short[:, : window + stride].isposinf().all()), "no shorter context than their own"
    assert float((short - expected.short)[:, window + stride :].abs().max()) <= 1e-5
    assert bool(((expected.weights[:, : window + stride] - 1).abs() <= 1e-12).all()), "the window at 0 is the whole context"
    assert bool((expected.weights < 0.8).any()) and bool((expected.weights == GAMMA).any()), "both ends occur"
    assert bool(((expected.weights[:, -1] - 1).abs() > 1e-3).any()), "the last token of a sample has a window"
    assert abs(losses.loss - expected.loss) <= 1e-5 and abs(losses.lm_loss - expected.lm_loss) <= 1e-5
    assert abs(losses.loss - losses.lm_loss) > 1e-3
    at_gamma = (expected.weights[:, window:] == GAMMA).double().mean().item()
    assert losses.longce["longce_mean_weight"] == pytest.approx(expected.weights.mean().item(), abs=1e-5)
    assert losses.longce["longce_at_gamma"] == pytest.approx(at_gamma, abs=1e-9)
    check_gradients(cells.assemble([gradients]), expected.gradients, 1e-4)


@pytest.fixture(scope="module")
def one_process(ranks, tiny_data):
    """Words of a model and its mask -> losses, parameters and gradients of one step on one process, computed once."""
    known = {}

    def compute(*more: str):
        if more not in known:
            words = tiny_words(tiny_data, "run_dir=unused", *longce(), *WIDE, *more)
            [(losses, parameters, gradients)] = ranks.run(1, cells.losses_and_gradients, words)
            [(_, _, short)] = ranks.run(1, longce_cells.short_losses_of, words)
            known[more] = losses, cells.assemble([parameters]), cells.assemble([gradients]), short
        return known[more]

    return compute


def check_layout(ranks, tiny_data, one_process, layout: str, *more: str) -> None:
    losses, parameters, gradients, short = one_process(*more)
    size, overrides = LAYOUTS[layout]
    words = tiny_words(tiny_data, "run_dir=unused", *longce(), *WIDE, *overrides, *more)
    answers = ranks.run(size, cells.losses_and_gradients, words)
    first = cells.assemble([shards for _, shards, _ in answers])
    assert all(torch.equal(first[name], parameters[name]) for name in parameters)
    for found, _, _ in answers:
        assert abs(found.loss - losses.loss) <= 1e-5 and abs(found.lm_loss - losses.lm_loss) <= 1e-5
        for name, value in losses.longce.items():
            assert found.longce[name] == pytest.approx(value, abs=1e-5), name
    check_gradients(cells.assemble([shards for _, _, shards in answers]), gradients, 1e-4)

    there = torch.zeros(short.shape, dtype=torch.bool)
    for answer in filter(None, ranks.run(size, longce_cells.short_losses_of, words)):
        data_rank, positions, mine = answer
        rows = data_rank * len(mine) + torch.arange(len(mine))[:, None]
        theirs = short[rows, positions]
        assert torch.equal(mine.isposinf(), theirs.isposinf())
        assert float((mine - theirs)[theirs.isfinite()].abs().max()) <= 1e-5
        there[rows, positions] = True
    assert bool(there.all()), "the ranks of the last stage know all short losses"


MODELS = {
    "whole samples": [],
    "documents": MASKS["documents"],
    "all mixers": [*MIXED["all mixers, HH"], "longce.window=8", *MASKS["documents"]],
}
"""Windows of attention are 20 wide in the last, those of LongCE 16."""
CHECKED = [
    ("tensor 2 + sequence", "all mixers"),
    ("context 2", "documents"),
    ("context 2", "all mixers"),
    ("pipeline 2", "documents"),
    ("pipeline 2 x virtual 2", "whole samples"),
    ("data 2", "whole samples"),
]


@pytest.mark.parametrize("layout, model", CHECKED)
def test_layout_has_the_same_losses_weights_and_gradients(ranks, tiny_data, one_process, layout, model):
    check_layout(ranks, tiny_data, one_process, layout, *MODELS[model])


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_further_layout_has_the_same_losses_weights_and_gradients(ranks, tiny_data, one_process, layout, model):
    check_layout(ranks, tiny_data, one_process, layout, *MODELS[model])


@pytest.mark.parametrize("layout", ["one process", "pipeline 2"])
def test_recomputation_changes_no_bit(ranks, tiny_data, layout):
    size, overrides = ({"one process": (1, [])} | LAYOUTS)[layout]
    words = tiny_words(tiny_data, "run_dir=unused", *longce(), *WIDE, *overrides)
    kept = ranks.run(size, cells.losses_and_gradients, words)
    for mode in ("selective", "full"):
        for mine, theirs in zip(ranks.run(size, cells.losses_and_gradients, [*words, f"train.recompute={mode}"]), kept):
            assert mine[0] == theirs[0]
            assert all(np.array_equal(a[-1], b[-1]) for a, b in zip(mine[2], theirs[2], strict=True))


def test_where_every_window_is_the_whole_context_it_is_plain_cross_entropy(ranks, tiny_data):
    """Bitwise, without any upper clamp to speak of."""
    words = tiny_words(tiny_data, "run_dir=unused", *WIDE)
    [(plain, _, expected)] = ranks.run(1, cells.losses_and_gradients, words)
    [(losses, _, gradients)] = ranks.run(1, cells.losses_and_gradients, [*words, *longce(56, 8, gamma=1e30)])
    assert losses.loss == plain.loss and losses.lm_loss == plain.lm_loss
    assert losses.longce == {"longce_mean_weight": 1.0, "longce_at_gamma": 0.0} and plain.longce == {}
    assert all(np.array_equal(mine[-1], theirs[-1]) for mine, theirs in zip(gradients, expected, strict=True))


def test_windows():
    """Against the definition, sample by sample; windows are of one sample each."""
    samples = torch.arange(3 * 40).view(3, 40)
    windows = Windows(40, 10, 6)
    expected = [row[begin : begin + 16] for row in samples for begin in range(6, 40 - 10, 6)]
    assert torch.equal(windows.cut(samples), torch.stack(expected)) and windows.count == 4
    starts = samples % 7 == 0
    cut = windows.cut_documents(starts)
    assert torch.equal(cut[:, 1:], windows.cut(starts)[:, 1:]) and bool(cut[:, 0].all())
    assert not bool(starts[0, 6]), "and the sample's own starts are left alone"
    joined = windows.join(windows.cut(samples)[:, 10:].double())
    assert bool(joined[:, :16].isposinf().all()) and torch.equal(joined[:, 16:], samples[:, 16:].double())
    assert Windows(16, 10, 6).count == 0


def test_weights():
    short, losses = torch.tensor([3.0, 2.0, 1.0, 9.0, torch.inf, torch.nan, 3.0]), torch.tensor([2.0, 2.0, 2.0, 2.0, 2.0, 2.0, torch.nan])
    found = longce_weights(short, losses, 5.0)
    assert torch.allclose(found[:4], torch.tensor([1.0, 0.0, -1.0, math.log(5)]).exp()), "below 1 too, and not above gamma"
    assert found[4] == 1 and bool(found[5:].isnan().all()), "a broken pass is not hidden"
    assert longce_weights(torch.tensor(100.0), torch.tensor(0.0), 5.0) == 5.0


def test_windows_that_leave_nothing_to_weigh_are_a_warning(ranks, tiny_data, tmp_path):
    words = tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}", *longce(56, 8), "train.tokens=1536", "validation.interval_steps=100")
    ended = train(ranks, 1, words)
    assert ended.code == 0 and "longce.stride=8: the first short context is the whole of train.context=64" in ended.err
    assert all(line["longce_mean_weight"] == 1 for line in computed(tmp_path / "run"))


@pytest.fixture(scope="module")
def run(ranks, tiny_data, tmp_path_factory) -> Path:
    return straight(ranks, tiny_data, tmp_path_factory.mktemp("longce") / "run", "one process", *longce(), *WIDE)


def test_resume_is_bitwise(ranks, tiny_data, tmp_path, run):
    check_bitwise(run, in_two_parts(ranks, tiny_data, tmp_path / "parts", "one process", "one process", *longce(), *WIDE))


def test_metrics_and_validation(ranks, tiny_data, run, one_process):
    lines = computed(run)
    for line in lines:
        assert 0 < line["longce_mean_weight"] <= GAMMA and 0 < line["longce_at_gamma"] < 1
        assert line["loss"] != line["lm_loss"]
    assert lines[-1]["lm_loss"] < lines[0]["lm_loss"] - 0.3, "it learns"
    plain, weighted = (
        ranks.run(1, longce_cells.validation_of, tiny_words(tiny_data, "run_dir=unused", *WIDE, *more))[0] for more in ([], longce())
    )
    assert plain == weighted


def test_what_is_logged_is_the_norm_of_the_weighted_gradient_and_it_is_clipped(ranks, tiny_data, one_process):
    gradients = one_process()[2]
    words = tiny_words(tiny_data, "run_dir=unused", *longce(), *WIDE)
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    [(found, used, _)] = ranks.run(1, one_step, words, norm / 3)
    assert found == pytest.approx(norm, rel=1e-5) and used == pytest.approx(norm / 3, rel=1e-4)


def test_bf16(ranks, tiny_data, tmp_path):
    """Weights of bf16 losses: at initialisation their mean is that of float32 to the precision of a logit."""
    words = tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}", *longce(), *WIDE)
    ended = train(ranks, 1, [*words, "train.precision=bf16", "train.tokens=2048"])
    assert ended.code == 0 and "longce     5 short contexts of 24 tokens a sample, the last 8 of each scored; gamma 1.1;" in ended.out
    lines = computed(tmp_path / "run")
    [(exact, _, _)] = ranks.run(1, cells.losses_and_gradients, words)
    assert len(lines) == 4
    assert lines[0]["longce_mean_weight"] == pytest.approx(exact.longce["longce_mean_weight"], abs=0.01)
    assert lines[0]["loss"] == pytest.approx(exact.loss, abs=0.02)


WRONG = {
    "not positive": (
        1,
        ["longce.window=0", "longce.stride=-1", "longce.gamma=0"],
        ["longce.window=0: it must be more than 0", "longce.stride=-1: it must be more than 0", "longce.gamma=0.0: it must be more than 0"],
    ),
    "not finite": (1, ["longce.gamma=.inf"], ["longce.gamma=inf: it must be a finite number"]),
    "too wide": (
        1,
        ["longce.window=60"],
        ["longce.window=60: with longce.stride=8 a short context is 68 tokens, more than train.context=64; lower one of them"],
    ),
    "uneven": (
        1,
        ["longce.stride=9"],
        ["longce.stride=9: it must divide train.context - longce.window = 48; use one of 1, 2, 3, 4, 6, 8, 12, 16, 24"],
    ),
    "context": (
        2,
        ["longce.stride=6", "parallel.context=2"],
        [
            "longce.stride=6: it must divide train.context - longce.window = 48, and longce.window + longce.stride must be a multiple of 4 "
            "under this layout; use one of 4, 8, 12, 16, 24"
        ],
    ),
    "tensor": (
        2,
        ["longce.stride=3", "parallel.tensor=2", "parallel.sequence=true"],
        [
            "longce.stride=3: it must divide train.context - longce.window = 48, and longce.window + longce.stride must be a multiple of 2 "
            "under this layout; use one of 2, 4, 6, 8, 12, 16, 24"
        ],
    ),
    "both rules": (
        2,
        ["longce.window=33", "longce.stride=31", "parallel.context=2", "train.context=66", "train.batch_tokens=528"],
        [
            "parallel.context=2: each rank takes two chunks, so train.context=66 must be a multiple of 4",
            "longce.stride=31: it must divide train.context - longce.window = 33, and longce.window + longce.stride must be a multiple of "
            "4 under this layout; use one of 3, 11",
        ],
    ),
    "no stride": (
        2,
        ["longce.window=45", "longce.stride=3", "parallel.context=2"],
        [
            "longce.stride=3: it must divide train.context - longce.window = 19, and longce.window + longce.stride must be a multiple of "
            "4 under this layout; no stride does with longce.window=45; use another"
        ],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_do_not_fit(tiny_data, case):
    size, overrides, sentences = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        validate(tiny_config(tiny_data, "run_dir=unused", *longce(), *overrides), size)
    assert caught.value.problems == sentences


def test_settings_of_longce_do_not_matter_without_it(tiny_data):
    validate(tiny_config(tiny_data, "run_dir=unused", "longce.window=4096", "longce.stride=7"), 1)
