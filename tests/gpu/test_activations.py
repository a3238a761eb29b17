"""What the accounts say a mixing layer keeps for its backward pass is what autograd keeps, with the kernels of a real run; and what passes
between its kernels lies where it should."""

from unittest.mock import patch

import pytest
import torch

from hybrid_megatron import platform
from hybrid_megatron.config import load_recipe
from hybrid_megatron.config.schema import ParallelConfig, RunConfig
from hybrid_megatron.model import mixer_layer
from hybrid_megatron.model.accounting import account
from hybrid_megatron.model.hybrid_model import build_model
from hybrid_megatron.model.mixers import MIXERS
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.ops.kernels import gated_norm, rotary, silu
from hybrid_megatron.ops.row_copy import copy_rows
from hybrid_megatron.parallel import SequenceLayout, start
from tests.cpu.kept import bytes_kept
from tests.definitions import relative_error

BATCH, LENGTH = 2, 2048
LAYERS = {
    "rope": ["rope"],
    "nope": ["rope", "pattern=[{mixer: attention, position: nope}]"],
    "nope, QK norm and gate": [
        "rope",
        "pattern=[{mixer: attention, position: nope}]",
        "model.attention={qk_norm: true, output_gate: silu}",
    ],
    "grouped queries": ["rope", "model.num_kv_heads=4"],
    "swa": ["swa_nope_lh"],
    "swa, QK norm and gate": ["swa_nope_lh", "model.swa={qk_norm: true, output_gate: sigmoid}"],
    "gla": ["gla_nope_lh"],
    "gdn": ["gdn_nope_lh"],
    "gdn, states computed again": ["gdn_nope_lh", "train.recompute=selective"],
    "gdn, no gate": ["gdn_nope_lh", "model.gdn.output_gate=none"],
    "gdn, convolution and QK norm": ["gdn_nope_lh", "model.gdn={short_conv: 4, qk_norm: true}"],
    "kda": ["kda_nope_lh"],
    "kda, no gate": ["kda_nope_lh", "model.kda.output_gate=none"],
    "kda, convolution and QK norm": ["kda_nope_lh", "model.kda={short_conv: 4, qk_norm: true}"],
    "lightning": ["lightning_nope_lh"],
    "mamba2": ["mamba2_nope_lh"],
    "mamba2, convolution and QK norm": ["mamba2_nope_lh", "model.mamba2={short_conv: 4, qk_norm: true}"],
    "rwkv7": ["rwkv7_nope_lh"],
    "rwkv7, rope": ["rwkv7_nope_lh", "pattern=[{mixer: rwkv7, position: rope}]"],
    "gdn and attention": ["gdn_nope_hh"],
    "rwkv7 and attention": ["rwkv7_nope_hh"],
}


@pytest.fixture(scope="module")
def state():
    platform.select_device()
    with start(ParallelConfig(), 0) as state:
        yield state


def build(state, name: str, batch: int = BATCH, length: int = LENGTH) -> tuple[RunConfig, torch.nn.Module, torch.Tensor]:
    """A small model whose first layer has these mixers, and an input for that layer."""
    pattern, *overrides = LAYERS[name]
    sizes = ["data.train=unused", "model.num_layers=4", "model.vocab_size=512", f"train.context={length}"]
    config = load_recipe([f"776m+{pattern}+pretrain_4k", *sizes, *overrides])
    hidden = torch.randn(length, batch, config.model.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return config, build_model(config, plan_layers(config), state), hidden


@pytest.mark.parametrize("name", LAYERS)
def test_kept_for_the_backward_pass(state, name):
    config, model, hidden = build(state, name)
    plan = type(plan_layers(config))(plan_layers(config).layers[:1])
    mixing = model.decoder.layers[0].self_attention
    layout = SequenceLayout(LENGTH)
    found = bytes_kept(mixing, hidden, layout, model)
    weight = mixing.order.computed_rows(1) * config.model.hidden_size * 2  # of the input projection, in block order
    expected = weight + BATCH * sum(account(config, plan).activation_bytes.values())
    if config.train.recompute == "selective":
        groups = plan.layers[0].groups
        expected -= sum(MIXERS[group.mixer].recomputed_bytes(config.model, group, BATCH * LENGTH, 2) for group in groups)
    print(f"{name}: kept {found:,} bytes, accounts {expected:,}, {found / expected:.4f}")
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", ["gla", "gdn", "kda", "lightning", "mamba2", "rwkv7"])
def test_kept_of_a_sample_in_pieces(state, name):
    """Four of 2,048 tokens; rwkv7's sample is not cut."""
    config, model, hidden = build(state, name, batch=1, length=8192)
    mixing = model.decoder.layers[0].self_attention
    mixer, group = MIXERS[name], plan_layers(config).layers[0].groups[0]
    found = bytes_kept(mixing, hidden, SequenceLayout(8192), model)
    more = mixer.pieces_kept_bytes(config.model, group, 1, 8192, 1)
    expected = mixing.order.computed_rows(1) * config.model.hidden_size * 2 + mixer.activation_bytes(config.model, group, 8192, 2) + more
    print(f"{name}: kept {found:,} bytes, accounts {expected:,}, {more:,} of them by pieces, {found / expected:.4f}")
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    "name", ["rope", "nope", "nope, QK norm and gate", "grouped queries", "swa", "gla", "gdn", "kda", "lightning", "rwkv7"]
)
def test_the_output_projection_takes_a_mixers_output_as_it_lies(state, name):
    """Whatever order FLA's and attention's kernels work in: no copy stands before it."""
    _, model, hidden = build(state, name)
    mixing, made, taken = model.decoder.layers[0].self_attention, [], []

    def mix(parts, layout, mix=mixing.mixers[0].mix) -> torch.Tensor:
        made.append(mix(parts, layout))
        return made[0]

    hook = mixing.out_proj.register_forward_pre_hook(lambda module, inputs: taken.append(inputs[0]))
    with patch.object(mixing.mixers[0], "mix", mix):
        mixing(hidden, packed_seq_params=SequenceLayout(LENGTH))
    hook.remove()
    assert taken[0].is_contiguous() and taken[0].data_ptr() == made[0].data_ptr()


@pytest.mark.parametrize("name", ["rope", "nope, QK norm and gate", "grouped queries", "gla", "gdn", "kda", "gdn and attention"])
def test_gradients_written_in_place_are_those_that_were_copied(state, name, monkeypatch):
    """cuDNN adds up the gradient of q in an order of its own each time."""
    _, model, hidden = build(state, name)
    mixing, copies = model.decoder.layers[0].self_attention, []
    weights = torch.randn_like(hidden)

    def gradients() -> list[torch.Tensor]:
        mixing.zero_grad(set_to_none=True)
        hidden.grad = None
        copies.clear()
        o, _ = mixing(hidden, packed_seq_params=SequenceLayout(LENGTH))
        o.backward(weights)
        return [hidden.grad, *(p.grad for p in mixing.parameters())]

    monkeypatch.setattr(mixer_layer, "copy_rows", lambda source, target: (copies.append(source), copy_rows(source, target)))
    in_place, left = gradients(), len(copies)
    for kernels in (silu, rotary, gated_norm):
        monkeypatch.setattr(kernels, "place_of_gradient", lambda x: None)
    copied = gradients()
    print(f"{name}: {left} of {len(copies)} slices copied")
    assert left < len(copies) or name == "nope, QK norm and gate"
    for mine, theirs in zip(in_place, copied):
        assert relative_error(mine, theirs) <= 1e-3
