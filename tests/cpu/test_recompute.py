"""Recomputation changes what is kept in memory between forward and backward, and not one bit of losses and gradients."""

import numpy as np
import pytest
import torch

from hybrid_megatron.config import load_recipe
from hybrid_megatron.data import BatchStream, open_dataset
from hybrid_megatron.model.hybrid_model import build_model
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.parallel import start
from tests.cpu import cells
from tests.cpu.quick import quick_and_slow
from tests.cpu.test_parity import LAYOUTS, MASKS
from tests.cpu.tiny import tiny_config, tiny_words

HERE = {"one process": (1, [])} | LAYOUTS
MODES = ("selective", "full")
CASES = [(layout, "documents") for layout in ("one process", "tensor 2 + sequence", "context 2", "pipeline 2 x virtual 2")]
CASES_MORE = [("one process", "whole samples"), ("pipeline 2", "documents"), ("context 2, pipeline 2", "documents")]


def compute(ranks, tiny_data, layout: str, mask: str, mode: str) -> list[tuple]:
    """(loss, parameters, gradients) of one step of every rank."""
    size, overrides = HERE[layout]
    words = tiny_words(tiny_data, "run_dir=unused", f"train.recompute={mode}", *overrides, *MASKS[mask])
    return ranks.run(size, cells.loss_and_gradients, words)


@pytest.mark.parametrize("layout, mask", quick_and_slow(CASES, CASES_MORE))
def test_losses_and_gradients_are_bitwise_the_same(ranks, tiny_data, layout, mask):
    kept = compute(ranks, tiny_data, layout, mask, "none")
    for mode in MODES:
        for (loss, _, gradients), (expected, _, expected_gradients) in zip(
            compute(ranks, tiny_data, layout, mask, mode), kept, strict=True
        ):
            assert loss == expected
            for (name, _, offset, mine), (same_name, _, same_offset, theirs) in zip(gradients, expected_gradients, strict=True):
                assert (name, offset) == (same_name, same_offset)
                assert np.array_equal(mine, theirs), f"{mode}: {name}"
                assert np.any(theirs), f"{name} has no gradient"


def saved_bytes(words: list[str]) -> int:
    """Bytes of all tensors that the forward pass of one micro-batch keeps for the backward pass, parameters aside."""
    config = load_recipe(words)
    data = open_dataset(config, "train")
    with start(config.parallel, config.seed) as state:
        model = build_model(config, plan_layers(config), state)
        stream = BatchStream(data, state, plan=config.batch_plan, micro_batch=config.train.micro_batch, seed=config.seed)
        batch = next(stream.step(0))
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage  # held, so that no address is used twice
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(batch.tokens, batch.targets, batch.weights, batch.layout)
            total = sum(storage.nbytes() for storage in kept.values())
            output.weighted_sum.backward()
        return total


@pytest.fixture(scope="module")
def kept(ranks, tiny_data) -> dict[str, int]:
    words = tiny_words(tiny_data, "run_dir=unused", "data.document_mask=true")
    return {mode: ranks.run(1, saved_bytes, [*words, f"train.recompute={mode}"])[0] for mode in ("none", *MODES)}


def test_selective_keeps_no_inner_activation_of_the_mlp(kept, tiny_data):
    """Of each token and layer, [ffn_size] each in float32: gate, up and their product."""
    config = tiny_config(tiny_data, "run_dir=unused")
    tokens = config.train.micro_batch * config.train.context
    assert kept["none"] - kept["selective"] == 3 * 4 * tokens * config.model.ffn_size * config.model.num_layers


def test_full_keeps_of_each_layer_its_input_alone(ranks, tiny_data, kept):
    """Twice the layers keep as many bytes more as the added layers have inputs, [hidden_size] a token in float32."""
    config = tiny_config(tiny_data, "run_dir=unused")
    words = tiny_words(tiny_data, "run_dir=unused", "data.document_mask=true", "train.recompute=full", "model.num_layers=8")
    [deep] = ranks.run(1, saved_bytes, words)
    tokens = config.train.micro_batch * config.train.context
    assert kept["full"] < kept["selective"] < kept["none"]
    assert deep - kept["full"] == 4 * tokens * config.model.hidden_size * config.model.num_layers
