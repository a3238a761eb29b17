"""Every mixer, alone, in all layers and in some heads of each, under every layout: the loss, first parameters and gradients of one process.

`make parity` prints all of it as a table. The default tests take models that hold all mixers at once.
"""

import pytest

from tests.cpu import cells
from tests.cpu.quick import half_quick
from tests.cpu.reference_model import reference_loss
from tests.cpu.test_parity import LAYOUTS, LAYOUTS_MORE, MASKS, check_gradients, compare_layout, first_batch
from tests.cpu.tiny import tiny_config, tiny_words
from tests.cpu.zoo import MATRIX, MIXED

MODELS = MIXED | MATRIX
ALL_TO_ALL = ["parallel.context_attention=all_to_all", "parallel.context_linear=all_to_all"]
ZOO_LAYOUTS = {name: LAYOUTS[name] for name in LAYOUTS if not name.startswith("data 4")} | {
    "context 4": LAYOUTS_MORE["context 4"],
    "context 2 by all-to-all": (2, ["parallel.context=2", *ALL_TO_ALL]),
}
"""The default tests' layouts for the models of all mixers."""
FEW = [
    "tensor 2 + sequence",
    "context 2",
    "context 4",
    "pipeline 2 x virtual 2",
    "tensor 2 + sequence, context 2",
    "context 2 by all-to-all",
]


@pytest.fixture(scope="module")
def one_process(ranks, tiny_data):
    """(model, mask) -> loss, parameters and gradients of one step on one process, computed once."""
    results = {}

    def of(model: str, mask: str):
        if (model, mask) not in results:
            words = tiny_words(tiny_data, "run_dir=unused", *MODELS[model], *MASKS[mask])
            [(loss, parameters, gradients)] = ranks.run(1, cells.loss_and_gradients, words)
            results[model, mask] = loss, cells.assemble([parameters]), cells.assemble([gradients])
        return results[model, mask]

    return of


def check_definition(one_process, tiny_data, parity_table, model: str, mask: str) -> None:
    loss, parameters, gradients = one_process(model, mask)
    config = tiny_config(tiny_data, "run_dir=unused", *MODELS[model], *MASKS[mask])
    weights = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    mean = reference_loss(config, weights, *first_batch(config))
    mean.backward()
    assert abs(loss - mean.item()) <= 1e-5
    worst = check_gradients(gradients, {name: w.grad for name, w in weights.items()}, 1e-4)
    parity_table.note(model, "one process against float64", mask, abs(loss - mean.item()), worst)


def check_cell(ranks, tiny_data, one_process, parity_table, model: str, layout: str, mask: str) -> None:
    size, overrides = ZOO_LAYOUTS[layout]
    words = tiny_words(tiny_data, "run_dir=unused", *MODELS[model], *overrides, *MASKS[mask])
    difference, worst = compare_layout(ranks.run(size, cells.loss_and_gradients, words), one_process(model, mask))
    parity_table.note(model, layout, mask, difference, worst)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("model", MIXED)
def test_models_of_all_mixers_compute_the_definition(one_process, tiny_data, parity_table, model, mask):
    check_definition(one_process, tiny_data, parity_table, model, mask)


@pytest.mark.parametrize("model, layout, mask", half_quick(MIXED, FEW, MASKS))
def test_models_of_all_mixers(ranks, tiny_data, one_process, parity_table, model, layout, mask):
    check_cell(ranks, tiny_data, one_process, parity_table, model, layout, mask)


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("model", MATRIX)
def test_matrix_computes_the_definition(one_process, tiny_data, parity_table, model, mask):
    check_definition(one_process, tiny_data, parity_table, model, mask)


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ZOO_LAYOUTS)
@pytest.mark.parametrize("model", MATRIX)
def test_matrix(ranks, tiny_data, one_process, parity_table, model, layout, mask):
    check_cell(ranks, tiny_data, one_process, parity_table, model, layout, mask)


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", [name for name in ZOO_LAYOUTS if name not in FEW])
@pytest.mark.parametrize("model", MIXED)
def test_models_of_all_mixers_under_further_layouts(ranks, tiny_data, one_process, parity_table, model, layout, mask):
    check_cell(ranks, tiny_data, one_process, parity_table, model, layout, mask)
