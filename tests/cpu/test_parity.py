"""Every layout computes the same: against the float64 definition of the whole model, and against one process."""

import math
from pathlib import Path

import pytest
import torch

from hybrid_megatron.parallel import SequenceLayout
from tests.cpu import cells
from tests.cpu.parity_table import TINY
from tests.cpu.quick import half_quick, quick_and_slow
from tests.cpu.reference_model import reference_loss
from tests.cpu.tiny import tiny_config, tiny_words

# name: (processes, overrides)
LAYOUTS = {
    "tensor 2": (2, ["parallel.tensor=2"]),
    "tensor 2 + sequence": (2, ["parallel.tensor=2", "parallel.sequence=true"]),
    "context 2": (2, ["parallel.context=2"]),
    "pipeline 2": (2, ["parallel.pipeline=2"]),
    "pipeline 2 x virtual 2": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
    "data 2": (2, []),
    "tensor 2 + sequence, context 2": (4, ["parallel.tensor=2", "parallel.sequence=true", "parallel.context=2"]),
    "tensor 2, pipeline 2": (4, ["parallel.tensor=2", "parallel.pipeline=2"]),
    "tensor 2 + sequence, data 2": (4, ["parallel.tensor=2", "parallel.sequence=true"]),
    "context 2, pipeline 2": (4, ["parallel.context=2", "parallel.pipeline=2"]),
    "context 2, data 2": (4, ["parallel.context=2"]),
    "pipeline 2, data 2": (4, ["parallel.pipeline=2"]),
    "data 4": (4, []),
}
LAYOUTS_MORE = {
    "context 4": (4, ["parallel.context=4"]),
    "pipeline 4": (4, ["parallel.pipeline=4"]),
    "pipeline 2 x virtual 2, data 2": (4, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
    "tensor 2 + sequence, pipeline 2 x virtual 2": (
        4,
        ["parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2", "parallel.virtual_pipeline=2"],
    ),
    "tensor 2, context 2": (4, ["parallel.tensor=2", "parallel.context=2"]),
    "tensor 2, data 2": (4, ["parallel.tensor=2"]),
    "tensor 2 + sequence, pipeline 2": (4, ["parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2"]),
}
MASKS = {"whole samples": [], "documents": ["data.document_mask=true"]}


@pytest.fixture(scope="module")
def one_process(ranks, tiny_data):
    """Loss, parameters and gradients of one step on one process, with and without document masks."""
    results = {}
    for name, mask in MASKS.items():
        [(loss, parameters, gradients)] = ranks.run(1, cells.loss_and_gradients, tiny_words(tiny_data, "run_dir=unused", *mask))
        results[name] = loss, cells.assemble([parameters]), cells.assemble([gradients])
    return results


def check_gradients(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float) -> float:
    """Relative to each parameter's own gradient, with a floor for those whose gradient is all but zero. Returns the largest error."""
    assert gradients.keys() == expected.keys()
    floor = 1e-4 * max(float(g.norm()) for g in expected.values())
    errors = {name: float((gradients[name] - g).norm()) / max(float(g.norm()), floor) for name, g in expected.items()}
    worst = max(errors, key=errors.get)
    assert errors[worst] <= bound, f"{worst}: {errors[worst]:.2e}"
    return errors[worst]


@pytest.mark.parametrize("mask", MASKS)
def test_one_process_computes_the_definition(one_process, tiny_data, parity_table, mask):
    loss, parameters, gradients = one_process[mask]
    config = tiny_config(tiny_data, "run_dir=unused", *MASKS[mask])
    samples = first_batch(config)
    weights = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    mean = reference_loss(config, weights, *samples)
    mean.backward()
    expected = mean.item()
    assert abs(loss - expected) <= 1e-5
    worst = check_gradients(gradients, {name: w.grad for name, w in weights.items()}, 1e-4)
    parity_table.note(TINY, "one process against float64", mask, abs(loss - expected), worst)
    assert abs(expected - math.log(config.model.vocab_size)) < 0.2, "an untrained model knows next to nothing"
    assert samples[0].numel() == config.train.batch_tokens


def first_batch(config) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Tokens, targets and document starts [b, s] of step 0, read without the code under test's BatchStream."""
    from hybrid_megatron.data import open_dataset

    samples = [open_dataset(config, "train").samples[i] for i in range(config.batch_samples)]
    tokens, targets = (torch.stack([sample[key] for sample in samples]) for key in ("tokens", "labels"))
    starts = (tokens == 1) if config.data.document_mask else None  # every document of the tiny data begins with BOS, word 1
    return tokens, targets, starts


def compare_layout(answers: list, expected: tuple, bounds: tuple[float, float] = (1e-5, 1e-4)) -> tuple[float, float]:
    """(difference of the loss, worst gradient) of a layout's ranks to one process, within the bounds; the first parameters are equal."""
    loss, parameters, gradients = expected
    difference = max(abs(other - loss) for other, _, _ in answers)
    assert difference <= bounds[0]
    first = cells.assemble([shards for _, shards, _ in answers])
    assert first.keys() == parameters.keys()
    assert all(torch.equal(first[name], parameters[name]) for name in parameters), "the first parameters depend on the layout"
    return difference, check_gradients(cells.assemble([shards for _, _, shards in answers]), gradients, bounds[1])


def check_layout(ranks, tiny_data, one_process, parity_table, name: str, mask: str) -> None:
    size, overrides = (LAYOUTS | LAYOUTS_MORE)[name]
    answers = ranks.run(size, cells.loss_and_gradients, tiny_words(tiny_data, "run_dir=unused", *overrides, *MASKS[mask]))
    parity_table.note(TINY, f"{name} ({size} processes)", mask, *compare_layout(answers, one_process[mask]))


@pytest.mark.parametrize("layout, mask", half_quick(LAYOUTS, MASKS))
def test_layout_has_the_same_parameters_loss_and_gradients(ranks, tiny_data, one_process, parity_table, layout, mask):
    check_layout(ranks, tiny_data, one_process, parity_table, layout, mask)


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS_MORE)
def test_further_layout_has_the_same_parameters_loss_and_gradients(ranks, tiny_data, one_process, parity_table, layout, mask):
    check_layout(ranks, tiny_data, one_process, parity_table, layout, mask)


def test_layouts_cut_every_token_once():
    whole = torch.arange(48)[None]
    for size in (1, 2, 3, 4):
        layouts = [SequenceLayout(48, size, rank) for rank in range(size)]
        assert sorted(torch.cat([layout.local(whole)[0] for layout in layouts]).tolist()) == list(range(48))
        assert all(torch.equal(layout.positions("cpu"), layout.local(whole)[0]) for layout in layouts)


@pytest.fixture(scope="module")
def one_process_training(ranks, tiny_data, tmp_path_factory) -> list[dict]:
    return ranks.run(1, cells.losses, tiny_words(tiny_data, f"run_dir={tmp_path_factory.mktemp('one') / 'run'}"))[0]


TRAINED = ["tensor 2 + sequence", "context 2"]
TRAINED_MORE = ["pipeline 2 x virtual 2", "data 2", "tensor 2", "pipeline 2", "tensor 2, pipeline 2"]


@pytest.mark.parametrize("layout", quick_and_slow(TRAINED, TRAINED_MORE))
def test_layout_trains_the_same(ranks, tiny_data, tmp_path: Path, one_process_training, parity_table, layout):
    """Twenty steps with the distributed optimizer: losses, gradient norms and validation."""
    size, overrides = LAYOUTS[layout]
    metrics = ranks.run(size, cells.losses, tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}", *overrides))[0]
    assert len(metrics) == len(one_process_training) == 20
    for mine, theirs in zip(metrics, one_process_training):
        assert abs(mine["loss"] - theirs["loss"]) <= 1e-5, mine["step"]
        assert abs(mine["grad_norm"] - theirs["grad_norm"]) <= 1e-4 * theirs["grad_norm"], mine["step"]
    assert abs(metrics[-1]["validation_loss"] - one_process_training[-1]["validation_loss"]) <= 1e-5
    difference = max(abs(mine["loss"] - theirs["loss"]) for mine, theirs in zip(metrics, one_process_training))
    parity_table.note(TINY, f"{layout} ({size} processes)", "20 steps", difference, None)
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.3, "it learns"
