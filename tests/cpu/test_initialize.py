"""Initial parameters: every one drawn, from the right distribution, by seed and name alone."""

import math

import pytest
import torch

from hybrid_megatron.config.schema import ParallelConfig
from hybrid_megatron.model.hybrid_model import HybridModel, build_model
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.parallel import start
from tests.cpu import cells, op_cells
from tests.cpu.cells import assemble
from tests.cpu.test_optimizer import groups
from tests.cpu.tiny import tiny_config, tiny_words
from tests.cpu.zoo import MIXED

# Large enough for statistics, small enough for a second: 64 heads of 4, so 128 gates in two layers.
WIDE = [
    "model.hidden_size=256", "model.num_heads=64", "model.num_kv_heads=8", "model.head_dim=4", "model.ffn_size=384", "model.vocab_size=512",
]  # fmt: skip


@pytest.fixture(scope="module")
def state():
    with start(ParallelConfig(), 0) as state:
        yield state


@pytest.fixture(scope="module")
def wide(state, tiny_data) -> dict[str, torch.Tensor]:
    return parameters(state, tiny_data, *WIDE)


def parameters(state, tiny_data, *overrides: str) -> dict[str, torch.Tensor]:
    config = tiny_config(tiny_data, "run_dir=unused", *overrides)
    return {name: p.detach().clone() for name, p in build_model(config, plan_layers(config), state).named_parameters()}


def test_matrices_are_normal(wide):
    """A sample of n has a standard deviation within 4 / sqrt(2 n) and a mean within 4 / sqrt(n) of the true ones, relative to 0.02."""
    matrices = {name: p for name, p in wide.items() if p.dim() == 2}
    assert len(matrices) == 2 + 4 * 4
    for name, p in matrices.items():
        n = p.numel()
        assert abs(float(p.std()) / 0.02 - 1) <= 4 / math.sqrt(2 * n), name
        assert abs(float(p.mean())) <= 4 * 0.02 / math.sqrt(n), name
        beyond = float((p.abs() > 0.04).float().mean())  # 4.55% of a normal distribution
        assert abs(beyond - 0.0455) <= 5 * math.sqrt(0.0455 / n), name


def test_init_std_is_heeded(state, tiny_data):
    deviations = [float(p.std()) for p in parameters(state, tiny_data, "model.init_std=0.1").values() if p.dim() == 2]
    assert all(abs(deviation / 0.1 - 1) < 0.15 for deviation in deviations)


def test_norms_are_ones(wide):
    norms = {name: p for name, p in wide.items() if "norm" in name}
    assert len(norms) == 2 * 4 + 1 + 2
    assert all(torch.equal(p, torch.ones_like(p)) for p in norms.values())


def test_decay_rates_are_uniform_between_0_and_16(wide):
    rates = torch.cat([p.exp() for name, p in wide.items() if name.endswith("A_log")])
    assert len(rates) == 128 and 0 < float(rates.min()) and float(rates.max()) < 16
    assert abs(float(rates.mean()) - 8) <= 4 * 16 / math.sqrt(12 * len(rates))
    assert float(rates.min()) < 2 and float(rates.max()) > 14


def test_time_steps_are_log_uniform_between_a_thousandth_and_a_tenth(wide):
    steps = torch.nn.functional.softplus(torch.cat([p for name, p in wide.items() if name.endswith("dt_bias")]).double()).log10()
    assert len(steps) == 128 and -3 - 1e-4 <= float(steps.min()) and float(steps.max()) <= -1 + 1e-4
    assert abs(float(steps.mean()) + 2) <= 4 * 2 / math.sqrt(12 * len(steps))
    assert float(steps.min()) < -2.7 and float(steps.max()) > -1.3


# Every kind of parameter that a mixer has.
EVERY_MIXER = [
    "pattern=[{mixer: gla}, {mixer: gdn}, {heads: [{mixer: lightning}, {mixer: swa}]}, {mixer: attention, position: rope}]",
    "model.gla.short_conv=4", "model.gdn.qk_norm=true", "model.gdn.short_conv=3", "model.attention.qk_norm=true", "model.swa.qk_norm=true",
    "model.gla.gate_rank=8", "model.swa.window=16",
]  # fmt: skip


KDA_AND_MAMBA2 = [
    "pattern=[{mixer: kda}, {mixer: mamba2}, {heads: [{mixer: kda}, {mixer: mamba2}]}, {mixer: attention, position: rope}]",
    "model.kda.short_conv=4", "model.mamba2.qk_norm=true",
]  # fmt: skip


@pytest.fixture(scope="module")
def kda_and_mamba2(state, tiny_data) -> dict[str, torch.Tensor]:
    return parameters(state, tiny_data, *WIDE, *KDA_AND_MAMBA2)


@pytest.fixture(scope="module")
def every_mixer(state, tiny_data) -> dict[str, torch.Tensor]:
    return parameters(state, tiny_data, *WIDE, *EVERY_MIXER)


def test_gates_of_gla_begin_at_a_half(every_mixer):
    """A bias of 0 and small matrices: the gate before its temperature is logsigmoid of nearly 0, as the paper's code begins."""
    [bias] = [p for name, p in every_mixer.items() if name.endswith("gate_bias")]
    assert bias.dtype == torch.float32 and torch.equal(bias, torch.zeros(64 * 4))
    for name, shape in (("gate_up", (64 * 4, 8)), ("shared_proj.weight", (8, 256))):
        [p] = [p for key, p in every_mixer.items() if key.endswith(name)]
        assert p.shape == shape and abs(float(p.std()) / 0.02 - 1) <= 4 / math.sqrt(2 * p.numel()), name


def test_decays_of_gdn_in_every_pattern(every_mixer):
    [rates], [steps] = ([p for name, p in every_mixer.items() if name.endswith(ending)] for ending in ("A_log", "dt_bias"))
    assert rates.dtype == steps.dtype == torch.float32 and rates.shape == steps.shape == (64,)
    assert 0 < float(rates.exp().min()) and float(rates.exp().max()) < 16 and float(rates.exp().std()) > 3
    steps = torch.nn.functional.softplus(steps.double()).log10()
    assert -3 - 1e-4 <= float(steps.min()) and float(steps.max()) <= -1 + 1e-4 and float(steps.std()) > 0.4


def test_decays_of_kda_and_mamba2(kda_and_mamba2):
    """As flash-linear-attention draws them: A from 1 to 16, a time step a head (mamba2) or a channel of 4 (kda), mamba2's skip at one."""
    own = {name.split("layers.")[1]: p for name, p in kda_and_mamba2.items() if "mixers." in name}
    assert all(p.dtype == torch.float32 for p in own.values())
    heads = {"0.self_attention.mixers.0": 64, "1.self_attention.mixers.0": 64} | {f"2.self_attention.mixers.{i}": 32 for i in (0, 1)}
    for place, count in heads.items():
        kda = place in ("0.self_attention.mixers.0", "2.self_attention.mixers.0")
        rates, steps = own[f"{place}.A_log"].exp(), torch.nn.functional.softplus(own[f"{place}.dt_bias"].double()).log10()
        assert rates.shape == (count,) and 1 <= float(rates.min()) < 3 and 14 < float(rates.max()) <= 16, place
        assert abs(float(rates.mean()) - 8.5) <= 4 * 15 / math.sqrt(12 * count), place
        assert steps.shape == (count * (4 if kda else 1),) and -3 - 1e-4 <= float(steps.min()) and float(steps.max()) <= -1 + 1e-4, place
        assert abs(float(steps.mean()) + 2) <= 4 * 2 / math.sqrt(12 * len(steps)), place
        if kda:
            assert torch.equal(own[f"{place}.z_bias"], torch.zeros(4 * count)), place
            for name in ("gate_up", "z_up"):
                p = own[f"{place}.{name}"]
                assert p.shape == (4 * count, 4) and abs(float(p.std()) / 0.02 - 1) <= 4 / math.sqrt(2 * p.numel()), place
        else:
            assert torch.equal(own[f"{place}.D"], torch.ones(count)), place


def test_norms_of_every_mixer_are_ones(every_mixer):
    norms = {name: p for name, p in every_mixer.items() if "norm" in name}
    inside = [name.split("self_attention.")[1] for name in norms if "self_attention" in name]
    assert sorted(inside) == sorted(
        ["mixers.0.out_norm"] + [f"mixers.0.{name}_norm" for name in ("q", "k", "out") * 2]
        + ["mixers.1.q_norm", "mixers.1.k_norm", "mixers.0.q_norm", "mixers.0.k_norm"]
    )  # fmt: skip
    assert all(torch.equal(p, torch.ones_like(p)) for p in norms.values())


def test_convolutions_begin_as_torch_draws_them(every_mixer):
    """Uniform within 1 / sqrt(width): with a standard deviation of 0.02 q, k and v would begin near nothing."""
    convolutions = {name: p for name, p in every_mixer.items() if ".conv_" in name}
    assert len(convolutions) == 6
    for name, p in convolutions.items():
        width = 4 if ".layers.0." in name else 3
        assert p.shape == (64 * 4, width)
        bound = width**-0.5
        assert float(p.abs().max()) <= bound and float(p.abs().max()) > 0.98 * bound, name
        assert abs(float(p.std()) * math.sqrt(3) / bound - 1) <= 4 / math.sqrt(2 * p.numel()), name


def test_gates_decays_and_norms_have_no_weight_decay(ranks, tiny_data):
    """Nor have the matrices that make gla's and kda's; those that make gdn's and mamba2's are rows of the input projection, and have."""
    found = [
        parameter
        for pattern in (EVERY_MIXER, KDA_AND_MAMBA2)
        for parameter in ranks.run(1, groups, tiny_words(tiny_data, "run_dir=unused", *pattern))[0]
    ]
    seen = set()
    for name, _, decay in found:
        inner = name.split("self_attention.")[-1].split(".")
        ending = inner[-1] if inner[-1] != "weight" else inner[-2]
        free = ending in ("A_log", "dt_bias", "D", "gate_up", "gate_bias", "z_up", "z_bias", "shared_proj")
        free = free or ending.endswith(("_norm", "layernorm"))
        assert decay == (0.0 if free else 0.1), name
        seen.add(ending)
    assert seen >= {
        "A_log",
        "dt_bias",
        "D",
        "gate_up",
        "gate_bias",
        "z_up",
        "z_bias",
        "shared_proj",
        "q_norm",
        "k_norm",
        "out_norm",
        "conv_q",
        "conv_v",
        "in_proj",
    }


RWKV7 = ["pattern=[{mixer: rwkv7}]", "model.hidden_size=96", "model.num_heads=6", "model.head_dim=16"]


@pytest.fixture(scope="module")
def rwkv7(state, tiny_data) -> dict[str, torch.Tensor]:
    return parameters(state, tiny_data, *RWKV7)


@pytest.mark.slow  # importing fla takes seconds
def test_rwkv7_begins_as_flas_layer_does(rwkv7):
    """Curves over channels and depth, and the widths of the bottlenecks."""
    from fla.layers.rwkv7 import RWKV7Attention

    for depth in range(4):
        theirs = RWKV7Attention(hidden_size=96, head_dim=16, layer_idx=depth, num_hidden_layers=4)
        expected = {
            "shift_mix": torch.cat([getattr(theirs, f"x_{name}").data.view(1, 96) for name in "rkvwag"]),
            "decay_bias": theirs.w_lora.lora[2].bias, "rate_bias": theirs.a_lora.lora[2].bias, "k_k": theirs.k_k, "k_a": theirs.k_a,
            "r_k": theirs.r_k.flatten(), "out_norm_weight": theirs.g_norm.weight, "out_norm_bias": theirs.g_norm.bias,
            "decay_down": theirs.w_lora.lora[0].weight, "rate_down": theirs.a_lora.lora[0].weight,
            "gate_down": theirs.g_lora.lora[0].weight,
        }  # fmt: skip
        for name, value in expected.items():
            mine = rwkv7[f"decoder.layers.{depth}.self_attention.mixers.0.{name}"]
            assert torch.allclose(mine, value.detach(), rtol=2e-5, atol=2e-6), f"layer {depth}, {name}"
        for name, module in {"decay_up": theirs.w_lora, "rate_up": theirs.a_lora, "gate_up": theirs.g_lora}.items():
            mine, drawn = rwkv7[f"decoder.layers.{depth}.self_attention.mixers.0.{name}"], module.lora[2].weight.detach()
            assert mine.shape == drawn.shape and abs(float(mine.norm() / drawn.norm()) - 1) < 1e-5, f"layer {depth}, {name}"


def test_projections_of_rwkv7_are_orthogonal(rwkv7):
    eye = torch.eye(96)
    for name, gain in (("r_proj", 1.0), ("k_proj", 0.1), ("v_proj", 1.0)):
        found = [p for key, p in rwkv7.items() if key.endswith(name)]
        assert len(found) == 4 and not torch.equal(found[0], found[1])
        for p in found:
            torch.testing.assert_close(p @ p.T, gain**2 * eye, rtol=0, atol=1e-5)


def test_matrices_of_rwkv7_that_make_gates_have_no_weight_decay(ranks, tiny_data):
    [found] = ranks.run(1, groups, tiny_words(tiny_data, "run_dir=unused", *RWKV7))
    decays = {name.split(".mixers.0.")[1]: decay for name, _, decay in found if ".mixers.0." in name}
    assert len(decays) == 3 + 6 + 2 + 5 + 1
    assert {name for name, decay in decays.items() if decay} == {"r_proj", "k_proj", "v_proj"}


def test_every_parameter_is_drawn(state, tiny_data, monkeypatch):
    """Whatever the modules put into their parameters when built is overwritten."""
    build = HybridModel.__init__

    def poisoned(self, *arguments) -> None:
        build(self, *arguments)
        for parameter in self.parameters():
            torch.nn.init.constant_(parameter, math.nan)

    monkeypatch.setattr(HybridModel, "__init__", poisoned)
    for overrides in ([], EVERY_MIXER, KDA_AND_MAMBA2, RWKV7):
        for name, p in parameters(state, tiny_data, *overrides).items():
            assert p.isfinite().all(), name


def test_no_two_parameters_are_alike(wide):
    drawn = [(name, p.flatten()) for name, p in wide.items() if "norm" not in name]
    for i, (name, p) in enumerate(drawn):
        for other, q in drawn[:i]:
            shared = min(len(p), len(q))
            assert not torch.equal(p[:shared], q[:shared]), f"{name} and {other}"


def test_gate_and_up_rows_differ(wide):
    for name, p in wide.items():
        if "linear_fc1" in name:
            gate, up = p.chunk(2)
            assert abs(float(torch.corrcoef(torch.stack((gate.flatten(), up.flatten())))[0, 1])) <= 5 / math.sqrt(gate.numel())


def test_the_seed_decides(state, tiny_data):
    first, again, other = (parameters(state, tiny_data, f"seed={seed}") for seed in (1, 1, 2))
    for name, p in first.items():
        assert torch.equal(p, again[name]), name
        assert "norm" in name or not torch.equal(p, other[name]), name


def test_torchs_own_generator_plays_no_part(state, tiny_data):
    torch.manual_seed(5)
    first = parameters(state, tiny_data)
    torch.manual_seed(6)
    before = torch.get_rng_state()
    again = parameters(state, tiny_data)
    assert all(torch.equal(p, again[name]) for name, p in first.items())
    assert torch.equal(torch.get_rng_state(), before)


def test_bf16_rounds_the_same_draws_and_keeps_gates_in_float32(state, tiny_data):
    wide, narrow = parameters(state, tiny_data), parameters(state, tiny_data, "train.precision=bf16")
    for name, p in narrow.items():
        gate = name.endswith(("A_log", "dt_bias"))
        assert p.dtype == (torch.float32 if gate else torch.bfloat16), name
        assert torch.equal(p, wide[name].to(p.dtype)), name


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, ["parallel.tensor=2"]),
        (4, ["parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2"]),
        (4, ["parallel.context=2", "parallel.pipeline=2"]),
        (4, ["parallel.pipeline=4"]),
    ],
)
def test_the_layout_does_not(ranks, tiny_data, size, layout):
    [alone] = ranks.run(1, op_cells.initial_parameters, tiny_words(tiny_data, "run_dir=unused"))
    shards = ranks.run(size, op_cells.initial_parameters, tiny_words(tiny_data, "run_dir=unused", *layout))
    whole, expected = assemble(shards), assemble([alone])
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[name], expected[name]) for name in expected)
    assert sum(array.size for _, _, _, array in shards[0]) < sum(array.size for _, _, _, array in alone), "each rank holds a part"


@pytest.mark.parametrize("model", MIXED)
def test_nothing_keeps_a_model_that_is_done_with(ranks, tiny_data, model):
    """A parameter that held its module by its `init` would: Python does not look for cycles through tensors that torch holds as well."""
    assert ranks.run(1, cells.mixers_left, tiny_words(tiny_data, "run_dir=unused", *MIXED[model])) == [0]
