"""Transformer Engine's modules in the places of ours: the same names, shards and values, and no state beside the parameters."""

from types import SimpleNamespace

import pytest
import torch

from hybrid_megatron import platform
from hybrid_megatron.config.megatron import sharding_metadata
from hybrid_megatron.config.schema import ParallelConfig
from hybrid_megatron.model import linear, norm
from hybrid_megatron.model.attention import backends
from hybrid_megatron.model.hybrid_model import build_model
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.parallel import start
from tests.cpu import cells
from tests.cpu.stand_in_engine import stand_in
from tests.cpu.tiny import tiny_config, tiny_words
from tests.cpu.zoo import MIXED

pytestmark = pytest.mark.skipif(platform.is_cuda(), reason="tests/gpu has the real one")
TE = ["model.kernels.linear=te", "model.kernels.norm=te"]


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    stand_in(monkeypatch)
    for module in (linear, norm):  # which ask for nothing else
        monkeypatch.setattr(module, "platform", SimpleNamespace(is_cuda=lambda: True, device=platform.device))


@pytest.mark.parametrize("model", MIXED)
def test_losses_and_gradients_are_the_same(tiny_data, model):
    words = tiny_words(tiny_data, "run_dir=unused", *MIXED[model])
    loss, _, gradients = cells.loss_and_gradients(words)
    with_te, _, gradients_with_te = cells.loss_and_gradients([*words, *TE])
    assert abs(with_te - loss) <= 1e-6
    ours, theirs = cells.assemble([gradients]), cells.assemble([gradients_with_te])
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert float((theirs[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), name


def test_checkpoints_are_the_same(tiny_data):
    with start(ParallelConfig(), 0) as state:
        states = []
        for words in ([], TE):
            config = tiny_config(tiny_data, "run_dir=unused", *words)
            model = build_model(config, plan_layers(config), state)
            names = {name: type(module) for name, module in model.named_modules()}
            tensors = model.sharded_state_dict(metadata=sharding_metadata(state.groups.dp_cp))
            plain = {name: getattr(each, "data", None) for name, each in tensors.items()}
            states.append({name: (type(each), each.key, str(getattr(each, "global_shape", ""))) for name, each in tensors.items()})
        assert states[0] == states[1]
        assert all(data is None for name, data in plain.items() if name.endswith("_extra_state"))
        te = [name for name, kind in names.items() if kind.__module__ == "hybrid_megatron.model.transformer_engine"]
        assert {name.rsplit(".", 1)[-1] for name in te} == {
            "in_proj", "out_proj", "linear_fc1", "linear_fc2", "input_layernorm", "pre_mlp_layernorm", "final_layernorm",
        }  # fmt: skip


def test_weights_add_their_own_gradients_but_those_put_in_order(tiny_data):
    """`fuse_wgrad_accumulation` is on where a gradient may go to its buffer at once."""
    from hybrid_megatron.model.transformer_engine import InputProjection, _Linear
    from hybrid_megatron.training.weight_gradients import add_weight_gradients_by_matmul

    with start(ParallelConfig(), 0) as state:
        config = tiny_config(tiny_data, "run_dir=unused", *TE)
        model = build_model(config, plan_layers(config), state)
        add_weight_gradients_by_matmul([model])
        found = {name: module for name, module in model.named_modules() if isinstance(module, _Linear)}
        assert found and all(module.fuse_wgrad_accumulation != isinstance(module, InputProjection) for module in found.values())


@pytest.mark.parametrize("queries", [12, 5])
def test_attention(queries):
    """Of slices of one projection, sequence first, as layers have them; queries all tokens or the last ones."""
    from hybrid_megatron.model.attention.transformer_engine import causal

    torch.manual_seed(0)
    projected = torch.randn(12, 2, (4 + 2 + 2) * 8, requires_grad=True)
    q, k, v = (x.unflatten(-1, (-1, 8)).permute(1, 2, 0, 3) for x in projected.split((32, 16, 16), dim=-1))
    q, weights = q[:, :, -queries:], torch.randn(2, 4, queries, 8)
    results = [attention(q, k, v, 0.3, *more) for attention, more in ((causal, ()), (backends.causal, ("auto",)))]
    gradients = [torch.autograd.grad((o * weights).sum(), projected, retain_graph=True)[0] for o in results]
    for ours, theirs in (results, gradients):
        assert torch.allclose(ours, theirs, atol=1e-6)
