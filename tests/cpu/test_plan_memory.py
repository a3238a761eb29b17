"""What `launch plan` says of memory and of what GPUs send: against what was measured, and against models that are built and run."""

from dataclasses import replace

import pytest

from hybrid_megatron.config import load_recipe
from hybrid_megatron.model.accounting import account
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.planning import choices
from hybrid_megatron.planning.communication import communication
from hybrid_megatron.planning.layout import Layout
from hybrid_megatron.planning.memory import (
    GIB,
    backward_bytes,
    gathered_bytes,
    layer_bytes,
    loss_bytes,
    memory,
    mixer_bytes,
    passes_in_flight,
    peak_memory,
)
from tests.cpu import plan_cells
from tests.cpu.plan_cells import layout
from tests.cpu.tiny import tiny_config, tiny_words
from tests.cpu.zoo import MATRIX, MIXED


LESS = 4 * 1536 * 128_256 / GIB
"""What was measured with a gradient of the output layer in float32 beside its buffer, which is gone; so rope, gla and gdn have it too."""


@pytest.mark.parametrize(
    "pattern, context, seen",
    [
        ("rope", 4096, 37.01), ("gdn_nope_lh", 4096, 43.19), ("gdn_nope_lh", 32_768, 43.36), ("gla_nope_lh", 4096, 42.73),
        ("gla_nope_lh", 32_768, 44.47), ("rope", 32_768, 37.75 - LESS), ("swa_nope_lh", 32_768, 37.19 - LESS),
        ("gla_nope_hh", 4096, 43.74 - LESS), ("kda_nope_lh", 4096, 45.04 - LESS), ("mamba2_nope_lh", 4096, 40.94 - LESS),
        ("rwkv7_nope_lh", 4096, 43.57 - LESS),
    ],
)  # fmt: skip
def test_peaks_measured_on_an_h200(pattern, context, seen):
    """776M on one GPU, 32,768 tokens at once (README); where one sample has them all, its states pass between pieces of it."""
    words = [f"train.context={context}", f"train.micro_batch={32_768 // context}", "train.batch_tokens=32_768"]
    assert peak_memory(layout(f"776m+{pattern}+pretrain_4k", *words)) / GIB == pytest.approx(seen, rel=0.005)


BUILT = {
    "one process": (1, []),
    "tensor 2": (2, ["parallel.tensor=2"]),
    "data 2": (2, []),
    "context 2": (2, ["parallel.context=2"]),
    "pipeline 2": (2, ["parallel.pipeline=2", "train.micro_batch=1"]),
    "tensor 2, data 2": (4, ["parallel.tensor=2", "parallel.sequence=true"]),
    "pipeline 2 x virtual 2": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "train.micro_batch=1"]),
}


@pytest.mark.parametrize("model, precision", [("all mixers, LH", "bf16"), ("all options, HH", "fp32")])
@pytest.mark.parametrize("name", BUILT)
def test_parameters_gradients_optimizer_and_passes_in_flight(ranks, tiny_data, name, model, precision):
    """Of each rank after a real step; what ranks of one optimizer hold between them is that of a plan to the byte."""
    size, overrides = BUILT[name]
    words = tiny_words(tiny_data, "run_dir=unused", f"train.precision={precision}", *MIXED[model], *overrides)
    config = load_recipe(words)
    of = Layout(config, plan_layers(config), size)
    expected, found = memory(of), ranks.run(size, plan_cells.after_a_step, words)
    for rank in found:
        stage = expected[rank["stage"]]
        assert (rank["weights"], rank["gradients"]) == (stage.weights, stage.gradients)
        assert rank["in_flight"] == stage.in_flight == sum(passes_in_flight(of, rank["stage"]))
    for stage in expected:
        held = sum(rank["optimizer"] for rank in found if rank["stage"] == stage.stage)
        assert 0 <= len([rank for rank in found if rank["stage"] == stage.stage]) * stage.optimizer - held < size, "rounded up to a byte"


@pytest.mark.parametrize("overrides", [[], ["parallel.tensor=2"], ["parallel.tensor=2", "parallel.sequence=true"]])
def test_norms_residuals_and_swiglu(ranks, tiny_data, overrides):
    """What a layer keeps beside its mixers. The CPU's norm, made of several operations, keeps its normalised input too, which CUDA's does
    not. In the backward pass gradients of weights come on top, a fiftieth here."""
    words = tiny_words(
        tiny_data,
        "run_dir=unused",
        "train.micro_batch=8",
        "model.num_kv_heads=4",
        "pattern=[{mixer: attention, position: nope}]",
        "model.attention.output_gate=silu",  # so that the output projection's input is not the mixer's
        *overrides,
    )
    config = load_recipe(words)
    of = Layout(config, plan_layers(config), config.parallel.tensor)
    layer = of.plan.layers[0]
    residual = 4 * 8 * 64 * 32 // of.residual_share
    for kept, buffer, beyond in ranks.run(config.parallel.tensor, plan_cells.layer_without_mixers, words):
        assert kept == layer_bytes(of, layer) - mixer_bytes(of, layer) + 2 * residual
        assert buffer == gathered_bytes(of)
        if config.parallel.tensor == 1:  # gloo's threads let go of what they sent at times of their own
            assert beyond == pytest.approx(backward_bytes(of, layer), rel=0.05)


@pytest.mark.parametrize("chunk", [32, 256])
def test_cross_entropy(ranks, tiny_data, chunk):
    """512 tokens in chunks of 32, when the backward pass needs most, and of 256, when logits do."""
    words = tiny_words(tiny_data, "run_dir=unused", "model.vocab_size=4096", "model.hidden_size=64", "train.micro_batch=8")
    config = load_recipe(words)
    of = Layout(config, plan_layers(config), 1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("hybrid_megatron.ops.linear_cross_entropy.CHUNK_ELEMENTS", chunk * 4096)
        expected = loss_bytes(of)
    norm = 4 * 512 * (2 * 64 + 1)  # not in the function; the gradient of the hidden states is
    [found] = ranks.run(1, plan_cells.loss, words, 512, chunk * 4096)
    assert found == pytest.approx(expected - norm, rel=0.01)


def test_recompute_and_sharing_save_memory():
    words = ["3b+gdn_nope_lh+pretrain_4k", "train.micro_batch=1"]
    kept = {mode: memory(layout(*words, f"train.recompute={mode}", gpus=8))[0].activations for mode in choices.RECOMPUTE}
    tokens, hidden, ffn, layers = 4096, 3072, 9728, 24
    states = layers * 3 // 4 * hidden // 128 * (128 + 128 + 128 * 128 // 64) * tokens * 2  # and updates, of the layers of gdn
    assert kept["none"] - kept["selective"] == layers * 3 * ffn * tokens * 2 + states
    assert kept["full"] == layers * hidden * tokens * 2
    one, eight = (memory(layout(*words, gpus=gpus))[0] for gpus in (1, 8))
    assert one.optimizer == 8 * eight.optimizer and one.activations == eight.activations
    assert memory(layout(*words, "parallel.context=2", gpus=8))[0].context > 0


# --- communication --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("model", "recompute"), [*(("all mixers, LH", mode) for mode in choices.RECOMPUTE), ("rwkv7, LH", "full"), ("rwkv7 + nope, HH", "full")]
)
def test_what_tensor_ranks_send(ranks, tiny_data, sequence, model, recompute):
    """rwkv7 projects the layer's input itself, alone in a layer or beside heads that do not."""
    more = ["parallel.tensor=2", f"parallel.sequence={str(sequence).lower()}", f"train.recompute={recompute}"]
    words = tiny_words(tiny_data, "run_dir=unused", *(MIXED | MATRIX)[model], *more)
    config = load_recipe(words)
    expected = communication(Layout(config, plan_layers(config), 2))["tensor"]
    assert ranks.run(2, plan_cells.sent_to_tensor_ranks, words) == [expected, expected]


def test_what_else_is_sent(tiny_data):
    config = tiny_config(tiny_data, "run_dir=unused", "parallel.pipeline=2", "train.micro_batch=1", *MIXED["all mixers, LH"])
    of = Layout(config, plan_layers(config), 4)
    sent, stages = communication(of), memory(of)
    most = max(stage.weights for stage in stages) // 4
    assert (sent["gradients"], sent["parameters"]) == (most * 4 / 2, most * 4 / 2)
    assert sent["pipeline"] == 4 * 64 * 32 * 4, "four micro-batches of 64 tokens, each across one border"
    assert (sent["tensor"], sent["context"]) == (0, 0)
    split = replace(config, parallel=replace(config.parallel, context=2, pipeline=1))
    accounts = account(split, of.plan)  # of a sample; tests/cpu/test_context_bytes.py has it counted
    sample = sum((*accounts.context_bytes.values(), *accounts.context_backward_bytes.values()))
    assert communication(Layout(split, of.plan, 4))["context"] == 4 * sample
