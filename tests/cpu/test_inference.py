"""Settings of inference on whole layers, layer-wise and head-wise, in float64: each against the same layer computed in another way."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from hybrid_megatron.config.schema import AttentionConfig, InferenceConfig, ParallelConfig
from hybrid_megatron.errors import ConfigError
from hybrid_megatron.model.head_group import Inference
from hybrid_megatron.model.hybrid_model import build_model
from hybrid_megatron.model.inference import with_inference
from hybrid_megatron.model.mixers import recurrent
from hybrid_megatron.model.mixers.attention import Attention
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.ops.swla import overlapped_windows
from hybrid_megatron.parallel import SequenceLayout, start
from tests import definitions
from tests.cpu.tiny import tiny_config
from tests.definitions import relative_error

TRAINED = 32
LENGTH = 4 * TRAINED
EXACT = 1e-12
WAYS = {
    "on layers": "[{{mixer: {mixer}, position: {position}}}]",
    "on heads": "[{{heads: [{{mixer: gdn, position: nope, share: 1}}, {{mixer: {mixer}, position: {position}, share: 1}}]}}]",
    "on heads, first": "[{{heads: [{{mixer: {mixer}, position: {position}, share: 1}},"
    " {{mixer: attention, position: {other}, share: 1}}]}}]",
}


class Build:
    """Layers of the tiny model with one and the same lively parameters, whatever they are set to."""

    def __init__(self, data, state):
        self.data, self.state = data, state

    def layer(self, way: str, mixer: str, position: str, *overrides: str, **settings):
        """MixerLayer in float64; `settings` are those of InferenceConfig."""
        other = "rope" if position == "nope" else "nope"
        pattern = WAYS[way].format(mixer=mixer, position=position, other=other)
        config = tiny_config(self.data, "run_dir=unused", "model.num_layers=1", f"pattern={pattern}", *overrides)
        plan = with_inference(plan_layers(config), InferenceConfig(**settings), TRAINED)
        layer = build_model(config, plan, self.state).decoder.layers[0].self_attention.double()
        random = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in layer.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0, 1.5 * parameter.shape[1] ** -0.5, generator=random)
        return layer


@pytest.fixture(scope="module")
def build(tiny_data):
    with start(ParallelConfig(), 0) as state:
        yield Build(tiny_data, state)


def hidden(length: int = LENGTH) -> Tensor:
    return torch.randn(1, length, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def output(layer, x: Tensor) -> Tensor:
    """[b, s, h] of [b, s, h]."""
    with torch.no_grad():
        o, _ = layer(x.transpose(0, 1), packed_seq_params=SequenceLayout(x.shape[1]))
    return o.transpose(0, 1)


def place(layer, mixer: str, position: str) -> int:
    """Number of the group."""
    return next(i for i, each in enumerate(layer.mixers) if (each.group.mixer, each.group.position) == (mixer, position))


def stored_rows(layer) -> list[dict[str, Tensor]]:
    """For each group its named rows' places in the weight of the input projection."""
    numbers = torch.arange(layer.order.rows, dtype=torch.float64)[:, None]
    return [{name: rows.long() for name, rows in part.items()} for part in layer.order.cut(layer.order.in_block_order(numbers)[:, 0])]


def scale_query_rows(layer, group: int, factor: float) -> None:
    """Multiply the rows of the input projection that make this group's queries."""
    rows = stored_rows(layer)[group]["q"].flatten()
    layer.in_proj.weight.data[rows] *= factor


def keep_only(layer, group: int) -> None:
    """Zero the columns of the output projection of all other groups."""
    weight = layer.out_proj.weight.data
    widths = [int(part["q"].numel()) for part in stored_rows(layer)]
    columns = torch.arange(sum(widths)).unflatten(0, (layer.order.units, -1))
    for other, part in enumerate(columns.split([width // layer.order.units for width in widths], dim=1)):
        if other != group:
            weight[:, part.flatten()] = 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [TRAINED // 2, TRAINED, LENGTH])
def test_log(build, way, length):
    x, plain = hidden(length), build.layer(way, "attention", "nope")
    before = output(plain, x)
    found = output(build.layer(way, "attention", "nope", logit_scale="log"), x)
    if length <= TRAINED:
        assert torch.equal(found, before)
        return
    assert relative_error(found, before) > 1e-3
    scale_query_rows(plain, place(plain, "attention", "nope"), math.log(length) / math.log(TRAINED))
    assert relative_error(found, output(plain, x)) <= EXACT


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [TRAINED // 2, LENGTH])
def test_constant(build, way, length):
    x, plain = hidden(length), build.layer(way, "attention", "nope")
    found = output(build.layer(way, "attention", "nope", logit_scale="constant", logit_scale_value=1.5), x)
    assert relative_error(found, output(plain, x)) > 1e-3
    scale_query_rows(plain, place(plain, "attention", "nope"), 1.5)
    assert relative_error(found, output(plain, x)) <= EXACT


@pytest.mark.parametrize("way", WAYS)
def test_hype_is_a_constant_of_its_own_at_each_position(build, way):
    base, x = 300.0, hidden()
    found = output(build.layer(way, "attention", "nope", logit_scale="hype", logit_scale_value=base), x)
    for t in (0, 31, 127):
        factor = math.log(t + base) / math.log(base)
        constant = build.layer(way, "attention", "nope", logit_scale="constant", logit_scale_value=factor)
        assert relative_error(found[:, t], output(constant, x)[:, t]) <= EXACT, t
    assert relative_error(found[:, -1], output(build.layer(way, "attention", "nope"), x)[:, -1]) > 1e-3


def test_hype_by_its_formula():
    """softmax(s_t q_t K^T / sqrt d) V with s_t = ln(t + a) / ln a, t from 0 (HypeNet, equation 11), at the attention itself."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 40, heads, 8, generator=random, dtype=torch.float64) for heads in (4, 2, 2))
    factors = torch.tensor([math.log(t + 20.0) / math.log(20.0) for t in range(40)], dtype=torch.float64)
    expected = definitions.causal_attention(q * factors[None, :, None, None], k, v, 8**-0.5)
    mixer = Attention.__new__(Attention)
    torch.nn.Module.__init__(mixer)
    mixer.model = dataclasses.make_dataclass("Model", ["head_dim", "attention"])(8, AttentionConfig())
    mixer.parallel, mixer.ranks = ParallelConfig(), dataclasses.make_dataclass("Ranks", ["cp"])(None)
    mixer.group = dataclasses.make_dataclass("Group", ["inference"])(Inference(8, "hype", 20.0))
    assert relative_error(mixer.attend(q, k, v, SequenceLayout(40)), expected) <= EXACT


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [TRAINED // 2, TRAINED, LENGTH])
def test_dynamic_ntk_is_another_rope_base(build, way, length):
    x, base, width = hidden(length), 10_000.0, 8
    found = output(build.layer(way, "attention", "rope", dynamic_ntk=True), x)
    before = output(build.layer(way, "attention", "rope"), x)
    if length <= TRAINED:
        assert torch.equal(found, before)
        return
    stretched = base * (length / TRAINED) ** (width / (width - 2))
    assert relative_error(found, before) > 1e-4
    assert relative_error(found, output(build.layer(way, "attention", "rope", f"model.attention.rope_base={stretched!r}"), x)) <= EXACT


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", [1, 24, LENGTH + 1])
def test_rope_window_is_swa(build, way, window):
    x = hidden()
    found = output(build.layer(way, "attention", "rope", rope_window=window), x)
    assert relative_error(found, output(build.layer(way, "swa", "rope", f"model.swa.window={window}"), x)) <= EXACT
    plain = output(build.layer(way, "attention", "rope"), x)
    assert relative_error(found, plain) <= EXACT if window > LENGTH else relative_error(found, plain) > 1e-2


# RoPE turns queries and keys alike, so a window of the input is a window of the recurrence where its transition commutes with the turning.
@pytest.mark.parametrize(
    "mixer, position",
    [(mixer, "nope") for mixer in ("gla", "gdn", "kda", "lightning", "mamba2")]
    + [(mixer, "rope") for mixer in ("gdn", "lightning", "mamba2")],
)
@pytest.mark.parametrize("way", ["on layers", "on heads, first"])
def test_swla_is_the_layer_on_overlapping_windows_of_its_input(build, way, mixer, position):
    """Windows [j S, j S + W) of the input, each from nothing; of each but the first the last S outputs count."""
    window, stride, x = 32, 8, hidden()
    plain, short = build.layer(way, mixer, position), build.layer(way, mixer, position, swla_window=window)
    for layer in (plain, short):
        keep_only(layer, place(layer, mixer, position))
    pieces = [output(plain, x[:, :window])]
    for begin in range(stride, LENGTH - window + stride, stride):
        pieces.append(output(plain, x[:, begin : begin + window])[:, window - stride :])
    found = output(short, x)
    assert relative_error(found, torch.cat(pieces, 1)) <= EXACT
    assert relative_error(found[:, window:], output(plain, x)[:, window:]) > 1e-5


@pytest.mark.parametrize("position", ["nope", "rope"])
@pytest.mark.parametrize("way", ["on layers", "on heads, first"])
@pytest.mark.parametrize("mixer", ["gla", "gdn", "kda", "lightning", "mamba2", "rwkv7"])
def test_swla_is_the_published_form(build, monkeypatch, way, mixer, position):
    """The recurrence of the layer replaced by ops/swla.py's overlapped windows, under a stride of its own and any options."""
    options = [] if mixer == "rwkv7" else [f"model.{mixer}.short_conv=3", f"model.{mixer}.qk_norm=true"]
    found = output(build.layer(way, mixer, position, *options, swla_window=48, swla_stride=24), hidden())
    plain = build.layer(way, mixer, position, *options)

    def published(recurrence, inputs, scale, layout, group):
        return overlapped_windows(recurrence, inputs, scale=scale, window=48, stride=24, document_starts=layout.local_document_starts())

    before = output(plain, hidden())
    monkeypatch.setattr(recurrent, "recurrence_over_ranks", published)
    assert relative_error(found, output(plain, hidden())) <= EXACT
    assert relative_error(found, before) > 1e-5


def test_swla_of_one_stride_and_of_a_window_beyond_the_input(build):
    x = hidden()
    plain = build.layer("on layers", "gdn", "nope")
    alone = output(build.layer("on layers", "gdn", "nope", swla_window=32, swla_stride=32), x)
    pieces = torch.cat([output(plain, piece) for piece in x.split(32, dim=1)], 1)
    assert relative_error(alone, pieces) <= EXACT, "each stride for itself"
    assert torch.equal(output(build.layer("on layers", "gdn", "nope", swla_window=256), x), output(plain, x))


def test_settings_of_one_layer_do_not_disturb_each_other(build):
    """SWLA on the linear heads and Log on the attention heads of one layer: the sum of the two heads' parts, each alone."""
    way, x = "on heads", hidden()
    both = {"logit_scale": "log", "swla_window": 32}
    whole = output(build.layer(way, "attention", "nope", **both), x)
    parts = []
    for group, own in ((0, {"swla_window": 32}), (1, {"logit_scale": "log"})):
        layer = build.layer(way, "attention", "nope", **own)
        keep_only(layer, group)
        parts.append(output(layer, x))
    assert relative_error(whole, sum(parts)) <= EXACT


def test_which_heads_a_setting_acts_on(tiny_data):
    pattern = (
        "[{heads: [{mixer: gdn, share: 2}, {mixer: attention, position: rope, share: 1}, {mixer: swa, share: 1}]}, {mixer: lightning},"
        "{mixer: attention, position: nope}, {mixer: gla, position: rope}]"
    )
    config = tiny_config(tiny_data, "run_dir=unused", "model.num_kv_heads=4", f"pattern={pattern}")
    settings = InferenceConfig("hype", 300.0, rope_window=32, swla_window=128)
    window, state = Inference(TRAINED, window=32), Inference(TRAINED, swla_window=128, swla_stride=32)
    scale = Inference(TRAINED, logit_scale="hype", logit_scale_value=300.0)
    found = [[group.inference for group in layer.groups] for layer in with_inference(plan_layers(config), settings, TRAINED)]
    assert found == [[state, window, Inference()], [state], [scale], [state]]
    assert with_inference(plan_layers(config), InferenceConfig(), TRAINED) == plan_layers(config)
    stretched = with_inference(plan_layers(config), InferenceConfig(dynamic_ntk=True), TRAINED)
    assert stretched.layers[0].groups[1].inference == Inference(TRAINED, dynamic_ntk=True)


WRONG = {
    "scale": (dict(logit_scale="sqrt"), "inference.logit_scale=sqrt: it must be one of none, log, hype, constant"),
    "hype without a base": (dict(logit_scale="hype"), "inference.logit_scale_value=null: with logit_scale=hype it is the base a"),
    "hype of base 1": (dict(logit_scale="hype", logit_scale_value=1.0), "must be more than 1"),
    "constant 0": (dict(logit_scale="constant", logit_scale_value=0.0), "it is the factor and must be more than 0"),
    "not a number": (dict(logit_scale="constant", logit_scale_value=math.nan), "must be more than 0"),
    "infinite": (dict(logit_scale="hype", logit_scale_value=math.inf), "must be more than 1"),
    "log of a value": (dict(logit_scale="log", logit_scale_value=2.0), "logit_scale=log takes no value"),
    "value alone": (dict(logit_scale_value=2.0), "logit_scale=none takes no value"),
    "window": (dict(rope_window=0), "inference.rope_window=0: it must be at least 1 token"),
    "window and NTK": (dict(rope_window=8, dynamic_ntk=True), "choose one of the two"),
    "stride alone": (dict(swla_stride=8), "inference.swla_stride=8: it is the stride of swla_window, which is not set"),
    "stride": (dict(swla_window=64, swla_stride=48), "inference.swla_window=64 with swla_stride=48: the window must be a multiple"),
    "stride 0": (dict(swla_window=64, swla_stride=0), "inference.swla_stride=0: it must be at least 1 token"),
    "quarter": (dict(swla_window=6), "with swla_stride unset, so a quarter of the window: the window must be a multiple of the stride"),
    "swla 0": (dict(swla_window=0), "inference.swla_window=0"),
    "swla -4": (dict(swla_window=-4, swla_stride=-2), "inference.swla_window=-4"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings(tiny_data, case):
    settings, sentence = WRONG[case]
    plan = plan_layers(tiny_config(tiny_data, "run_dir=unused"))
    with pytest.raises(ConfigError) as caught:
        with_inference(plan, InferenceConfig(**settings), TRAINED)
    [said] = caught.value.problems
    assert sentence in said


NOTHING = {
    "logit_scale": (
        "{mixer: attention, position: rope}",
        dict(logit_scale="log"),
        "inference.logit_scale=log: it acts on attention without position",
    ),
    "dynamic_ntk": ("{mixer: swa}", dict(dynamic_ntk=True), "inference.dynamic_ntk=true: it acts on attention with RoPE"),
    "rope_window": ("{mixer: attention, position: nope}", dict(rope_window=8), "inference.rope_window=8: it acts on attention with RoPE"),
    "swla_window": ("{mixer: swa}", dict(swla_window=8), "inference.swla_window=8: it acts on gla, gdn, kda, lightning, mamba2 or rwkv7"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_setting_that_acts_on_nothing(tiny_data, case):
    entry, settings, sentence = NOTHING[case]
    plan = plan_layers(tiny_config(tiny_data, "run_dir=unused", f"pattern=[{entry}]"))
    with pytest.raises(ConfigError) as caught:
        with_inference(plan, InferenceConfig(**settings), TRAINED)
    assert caught.value.problems == [f"{sentence}, and this model has none of it; leave it out"]


def test_everything_wrong_is_said_at_once(tiny_data):
    plan = plan_layers(tiny_config(tiny_data, "run_dir=unused", "pattern=[{mixer: gdn}]"))
    with pytest.raises(ConfigError) as caught:
        with_inference(plan, InferenceConfig("log", 2.0, rope_window=-1, swla_window=5), TRAINED)
    assert len(caught.value.problems) == 5, "three wrong values, and two that act on nothing"
