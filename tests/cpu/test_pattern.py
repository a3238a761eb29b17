"""Patterns: what a recipe's `pattern` makes of the layers and their heads, and what is said of patterns and mixers that cannot be."""

import json
import re

import pytest

from hybrid_megatron.config import RunConfig, load_recipe
from hybrid_megatron.config.validate import validate
from hybrid_megatron.errors import ConfigError
from hybrid_megatron.model.pattern import HeadGroup, plan_layers

# Twelve heads and twelve layers have many divisors; FFN and vocabulary go with every tensor size used here.
RECIPE = """
bases: [base]
model: {num_layers: 12, hidden_size: 64, num_heads: 12, head_dim: 8, ffn_size: 240, vocab_size: 480}
train: {tokens: 10240, context: 64, batch_tokens: 512, micro_batch: 2, precision: fp32}
optimizer: {peak_lr: 3.0e-3, weight_decay: 0.1}
schedule: {warmup_tokens: 1024}
data: {train: somewhere}
"""
NOPE, ROPE = {"mixer": "attention", "position": "nope"}, {"mixer": "attention", "position": "rope"}
GDN, GLA, KDA, SWA, LIGHTNING, MAMBA2 = ({"mixer": name} for name in ("gdn", "gla", "kda", "swa", "lightning", "mamba2"))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Loads the recipe above with a pattern and overrides."""
    path = tmp_path_factory.mktemp("pattern") / "recipe.yaml"
    path.write_text(RECIPE)

    def load(pattern: list[dict], *overrides: str) -> RunConfig:
        return load_recipe([str(path), f"pattern={json.dumps(pattern)}", *overrides])

    return load


def groups(config: RunConfig) -> list[tuple[tuple[str, str, int], ...]]:
    """(mixer, position, heads) of each group of each layer."""
    plan = plan_layers(config)
    validate(config, 1)
    assert [layer.number for layer in plan] == list(range(1, config.model.num_layers + 1))
    assert all(isinstance(group, HeadGroup) for layer in plan for group in layer.groups)
    return [tuple((group.mixer, group.position, group.heads) for group in layer.groups) for layer in plan]


LINEAR, FULL = (("gdn", "nope", 12),), (("attention", "nope", 12),)


def test_entries_repeat_until_the_layers_are_full(recipe):
    assert groups(recipe([GDN])) == [LINEAR] * 12
    assert groups(recipe([GDN | {"repeat": 3}, NOPE])) == [LINEAR, LINEAR, LINEAR, FULL] * 3
    assert groups(recipe([NOPE, GDN | {"repeat": 5}])) == [FULL, *[LINEAR] * 5] * 2


def test_every_layer_by_itself(recipe):
    listed = [GDN, NOPE, GDN, GDN, NOPE, GDN, GDN, GDN, NOPE, GDN, GDN, GDN]
    assert groups(recipe(listed)) == [FULL if entry is NOPE else LINEAR for entry in listed]


@pytest.mark.parametrize(
    ("layers", "shares", "linear"),
    [(12, (3, 1), 9), (12, (1, 1), 6), (12, (1, 3), 3), (16, (6, 2), 12), (12, (5, 1), 10), (12, (11, 1), 11)],
)
def test_layers_by_share_are_one_run_each(recipe, layers, shares, linear):
    config = recipe([GDN | {"share": shares[0]}, NOPE | {"share": shares[1]}], f"model.num_layers={layers}")
    assert groups(config) == [LINEAR] * linear + [FULL] * (layers - linear)


@pytest.mark.parametrize(
    ("shares", "heads"), [((3, 1), (9, 3)), ((1, 1), (6, 6)), ((1, 3), (3, 9)), ((2, 1), (8, 4)), ((1, 2), (4, 8)), ((7, 5), (7, 5))]
)
def test_heads_by_share(recipe, shares, heads):
    entry = {"heads": [GDN | {"share": shares[0]}, NOPE | {"share": shares[1]}]}
    assert groups(recipe([entry])) == [(("gdn", "nope", heads[0]), ("attention", "nope", heads[1]))] * 12


def test_shares_are_proportions(recipe):
    halves = (("gdn", "nope", 6), ("attention", "nope", 6))
    for listed in ([GDN, NOPE], [GDN | {"share": 5}, NOPE | {"share": 5}], [GDN | {"share": 12}, NOPE | {"share": 12}]):
        assert groups(recipe([{"heads": listed}])) == [halves] * 12
    assert groups(recipe([{"heads": [GDN | {"share": 7}]}])) == [LINEAR] * 12


def test_heads_of_several_mixers_in_the_order_written(recipe):
    entry = {"heads": [SWA | {"share": 1}, ROPE | {"share": 1}, GLA | {"share": 2}, LIGHTNING | {"share": 2}]}
    expected = (("swa", "rope", 2), ("attention", "rope", 2), ("gla", "nope", 4), ("lightning", "rope", 4))
    assert groups(recipe([entry], "model.swa.window=16")) == [expected] * 12


def test_head_wise_and_layer_wise_entries_stand_beside_each_other(recipe):
    mixed = {"heads": [GDN | {"share": 3}, NOPE | {"share": 1}], "repeat": 2}
    halves = (("gdn", "nope", 9), ("attention", "nope", 3))
    assert groups(recipe([mixed, NOPE])) == [halves, halves, FULL] * 4
    by_share = [{"heads": [GDN | {"share": 3}, NOPE | {"share": 1}], "share": 2}, NOPE | {"share": 1}]
    assert groups(recipe(by_share)) == [halves] * 8 + [FULL] * 4


@pytest.mark.parametrize(
    ("mixer", "position"),
    [("swa", "rope"), ("lightning", "rope"), *((mixer, "nope") for mixer in ("gla", "gdn", "kda", "mamba2", "rwkv7"))],
)
def test_positions_where_none_is_written(recipe, mixer, position):
    other = "rope" if position == "nope" else "nope"
    assert groups(recipe([{"mixer": mixer}], "model.swa.window=16")) == [((mixer, position, 12),)] * 12
    assert groups(recipe([{"mixer": mixer, "position": other}], "model.swa.window=16")) == [((mixer, other, 12),)] * 12


def test_defaults_of_the_mixers(recipe):
    model = recipe([GDN]).model
    expected = {
        "attention": {"rope_base": 10_000, "qk_norm": False, "output_gate": "none", "backend": "auto"},
        "swa": {"window": 128, "rope_base": 10_000, "qk_norm": False, "output_gate": "none"},
        "gla": {"qk_norm": False, "output_gate": "silu", "short_conv": 0, "num_kv_heads": None, "rope_base": 10_000}
        | {"gate_rank": 16, "gate_temperature": 16},
        "gdn": {"qk_norm": False, "output_gate": "silu", "short_conv": 0, "num_kv_heads": None, "rope_base": 10_000}
        | {"allow_neg_eigval": False},
        "kda": {"qk_norm": False, "output_gate": "sigmoid", "short_conv": 0, "num_kv_heads": None, "rope_base": 10_000}
        | {"allow_neg_eigval": False},
        "lightning": {"qk_norm": True, "output_gate": "sigmoid", "short_conv": 0, "num_kv_heads": None, "rope_base": 10_000},
        "mamba2": {"qk_norm": False, "output_gate": "silu", "short_conv": 0, "num_kv_heads": None, "rope_base": 10_000},
        "rwkv7": {"rope_base": 10_000, "decay_rank": None, "rate_rank": None, "gate_rank": None},
    }
    assert {mixer: vars(getattr(model, mixer)) for mixer in expected} == expected


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ([GDN | {"repeat": 3}, NOPE], ["gdn x3", "attention (nope) x1"]),
        ([GDN | {"share": 3}, ROPE | {"share": 1}], ["gdn x9", "attention (rope) x3"]),
        ([SWA | {"repeat": 2}, LIGHTNING], ["swa x2", "lightning x1"]),
    ],
)
def test_names_printed(recipe, pattern, names):
    printed = str(plan_layers(recipe(pattern)))
    assert printed == ", ".join(names * (12 // sum(int(name.split("x")[-1]) for name in names)))


def test_names_of_mixes_printed(recipe):
    printed = str(plan_layers(recipe([{"heads": [GDN | {"share": 3}, NOPE | {"share": 1}], "repeat": 3}, NOPE])))
    head_wise, full = "9 gdn + 3 attention (nope) heads", "attention (nope)"
    assert printed == ", ".join([f"{head_wise} x3", f"{full} x1"] * 3)


def heads(*listed: dict) -> list[dict]:
    return [{"heads": list(listed)}]


WINDOW = "model.swa.window=16"
MIXERS = ["attention", "swa", "gla", "gdn", "kda", "lightning", "mamba2", "rwkv7"]
GATES = ["none", "sigmoid", "silu"]
# name: (pattern, overrides, words and numbers that the one sentence must hold)
PATTERNS = {
    "shares that do not divide the heads": (
        heads(GDN | {"share": 3}, NOPE | {"share": 2}), [], ["pattern[0].heads", "3 : 2", "model.num_heads=12", "2, 3, 4, 6, 12"],
    ),
    "shares of a later entry": (
        [GDN, *heads(GDN | {"share": 4}, NOPE | {"share": 1})], [], ["pattern[1].heads", "4 : 1", "model.num_heads=12", "2, 3, 4, 6, 12"],
    ),
    "shares of three": (heads(GDN | {"share": 3}, SWA, NOPE), [WINDOW], ["3 : 1 : 1", "model.num_heads=12", "3, 4, 6, 12"]),
    "less than a head": (heads(GDN | {"share": 23}, NOPE), [], ["pattern[0].heads", "23 : 1", "model.num_heads=12"]),
    "more mixers than heads": (heads(*[GDN] * 13), [], ["pattern[0].heads", "model.num_heads=12"]),
    "a pattern that does not divide the layers": ([GDN | {"repeat": 4}, NOPE], [], ["5", "model.num_layers=12", "10", "15"]),
    "a pattern longer than the model": ([GDN | {"repeat": 12}, NOPE], [], ["13", "model.num_layers=12"]),
    "layer shares that do not divide the layers": (
        [GDN | {"share": 4}, NOPE | {"share": 1}], [], ["4 : 1", "model.num_layers=12", "10", "15"],
    ),
    "mixer and heads": ([GDN | {"heads": [NOPE | {"share": 1}]}], [], ["pattern[0]", "mixer", "heads"]),
    "neither mixer nor heads": ([GDN, {"position": "nope"}], [], ["pattern[1]", "mixer", "heads"]),
    "no heads": ([{"heads": []}], [], ["pattern[0]", "mixer", "heads"]),
    "a share of nothing": (heads(GDN | {"share": 0}, NOPE | {"share": 1}), [], ["pattern[0].heads[0].share=0", "more than 0"]),
    "a share below nothing": (heads(GDN | {"share": 3}, NOPE | {"share": -1}), [], ["pattern[0].heads[1].share=-1", "more than 0"]),
    "a layer share of nothing": ([GDN | {"share": 0}, NOPE | {"share": 1}], [], ["pattern[0].share=0", "more than 0"]),
    "a share in one entry alone": ([GDN | {"share": 3}, NOPE], [], ["pattern", "share", "every"]),
    "a share beside a repeat": ([GDN | {"share": 3}, NOPE | {"share": 1, "repeat": 2}], [], ["pattern", "share", "repeat"]),
    "a repeat among heads": (heads(GDN | {"repeat": 2}, NOPE), [], ["pattern[0].heads[0].repeat", "mixer", "position", "share"]),
    "an unknown mixer": ([{"mixer": "gated"}], [], ["pattern[0].mixer=gated", *MIXERS]),
    "an unknown mixer among heads": (
        heads(GDN | {"share": 1}, {"mixer": "glaa", "share": 1}), [], ["pattern[0].heads[1].mixer=glaa", *MIXERS],
    ),
    "attention without a position": ([GDN, {"mixer": "attention"}], [], ["attention", "position", "rope", "nope"]),
    "attention among heads without a position": (
        heads(GDN | {"share": 1}, {"mixer": "attention", "share": 1}), [], ["attention", "position", "rope", "nope"],
    ),
    "a position that does not exist": ([GDN | {"position": "alibi"}], [], ["pattern[0].position=alibi", "rope", "nope"]),
    "a position of no letters": ([GDN | {"position": ""}], [], ["pattern[0].position=", "rope", "nope"]),
    "a position above the heads": ([{"heads": [GDN | {"share": 1}], "position": "nope"}], [], ["pattern[0]", "position", "heads"]),
    "an odd head size under RoPE": ([GDN | {"position": "rope"}], ["model.head_dim=7"], ["model.head_dim=7", "even"]),
}  # fmt: skip
SETTINGS = {
    "window of nothing": ([SWA], ["model.swa.window=0"], ["model.swa.window=0", "more than 0"]),
    "window wider than the sample": ([SWA], ["model.swa.window=65"], ["model.swa.window=65", "train.context=64"]),
    "window among heads wider than the sample": (
        heads(SWA | {"share": 1}, NOPE | {"share": 1}), ["model.swa.window=65"], ["model.swa.window=65", "train.context=64"],
    ),
    "output gate of attention": ([NOPE], ["model.attention.output_gate=tanh"], ["model.attention.output_gate=tanh", *GATES]),
    "output gate of swa": ([SWA], [WINDOW, "model.swa.output_gate=SiLU"], ["model.swa.output_gate=SiLU", *GATES]),
    "output gate of gla": ([GLA], ["model.gla.output_gate=swish"], ["model.gla.output_gate=swish", *GATES]),
    "output gate of gdn": ([GDN], ["model.gdn.output_gate=''"], ["model.gdn.output_gate=", *GATES]),
    "output gate of lightning": ([LIGHTNING], ["model.lightning.output_gate=relu"], ["model.lightning.output_gate=relu", *GATES]),
    "output gate of kda": ([KDA], ["model.kda.output_gate=swish"], ["model.kda.output_gate=swish", *GATES]),
    "output gate of mamba2": ([MAMBA2], ["model.mamba2.output_gate=swish"], ["model.mamba2.output_gate=swish", *GATES]),
    "rank of the gate": ([GLA], ["model.gla.gate_rank=0"], ["model.gla.gate_rank=0", "more than 0"]),
    "temperature of the gate": ([GLA], ["model.gla.gate_temperature=-1"], ["model.gla.gate_temperature=-1", "more than 0"]),
    "width of a convolution": ([GDN], ["model.gdn.short_conv=-1"], ["model.gdn.short_conv=-1", "0 or more"]),
    "base of RoPE": ([LIGHTNING], ["model.lightning.rope_base=0"], ["model.lightning.rope_base=0", "more than 0"]),
    "key-value heads": ([NOPE], ["model.num_kv_heads=5"], ["model.num_kv_heads=5", "model.num_heads=12"]),
    "key-value heads of gla": ([GLA], ["model.gla.num_kv_heads=5"], ["model.gla.num_kv_heads=5", "model.num_heads=12"]),
    "key-value heads of gdn": ([GDN], ["model.gdn.num_kv_heads=24"], ["model.gdn.num_kv_heads=24", "model.num_heads=12"]),
    "key-value heads of lightning": (
        [LIGHTNING], ["model.lightning.num_kv_heads=8"], ["model.lightning.num_kv_heads=8", "model.num_heads=12"],
    ),
    "key-value heads of kda": ([KDA], ["model.kda.num_kv_heads=5"], ["model.kda.num_kv_heads=5", "model.num_heads=12"]),
    "key-value heads of mamba2": ([MAMBA2], ["model.mamba2.num_kv_heads=8"], ["model.mamba2.num_kv_heads=8", "model.num_heads=12"]),
    "key-value heads of nothing": ([GLA], ["model.gla.num_kv_heads=0"], ["model.gla.num_kv_heads=0", "more than 0"]),
    "fewer heads of a mix than share a key": (
        heads(GDN | {"share": 3}, NOPE | {"share": 1}), ["model.num_kv_heads=2"], ["attention", "model.num_kv_heads=2", "3", "6"],
    ),
    "fewer linear heads of a mix than share a key": (
        heads(GDN | {"share": 1}, NOPE | {"share": 3}), ["model.gdn.num_kv_heads=3"], ["gdn", "model.gdn.num_kv_heads=3", "3", "4"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PATTERNS | SETTINGS)
def test_what_cannot_be_is_one_sentence(recipe, case):
    pattern, overrides, expected = (PATTERNS | SETTINGS)[case]
    said = problem(lambda: validate(recipe(pattern, *overrides), 1))
    for words in expected:
        assert holds(said, words), f"{words} is missing: {said}"
    assert "one of ," not in said, "nothing is offered"


def problem(checked) -> str:
    with pytest.raises(ConfigError) as caught:
        checked()
    [said] = caught.value.problems
    return said


def holds(said: str, words: str) -> bool:
    """Whether `words` stand in the sentence, not as a part of a longer word or number."""
    return re.search(rf"(?<![\w.]){re.escape(words)}(?!\w)", said) is not None


def sizes_offered(said: str) -> list[int]:
    return [int(size) for size in said.rsplit("one of ", 1)[1].split(", ")]


# name: (pattern, overrides, a tensor size that cannot be, those that can)
TENSOR = {
    "twelve heads": ([GDN], [], 5, [1, 2, 3, 4, 6, 12]),
    "four key-value heads": ([NOPE], ["model.num_kv_heads=4"], 3, [1, 2, 4]),
    "key-value heads of swa": ([SWA], [WINDOW, "model.num_kv_heads=3"], 2, [1, 3]),
    "key-value heads of gla": ([GLA], ["model.gla.num_kv_heads=2"], 3, [1, 2]),
    "3:1 of twelve heads": (heads(GDN | {"share": 3}, NOPE | {"share": 1}), [], 2, [1, 3]),
    "1:1 of twelve heads": (heads(GDN | {"share": 1}, NOPE | {"share": 1}), [], 4, [1, 2, 3, 6]),
    "7:5 of twelve heads": (heads(GDN | {"share": 7}, NOPE | {"share": 5}), [], 2, [1]),
    "2:1:1 of twelve heads": (heads(GDN | {"share": 2}, SWA | {"share": 1}, NOPE | {"share": 1}), [WINDOW], 2, [1, 3]),
    "1:1 with four key-value heads": (heads(GDN | {"share": 1}, NOPE | {"share": 1}), ["model.num_kv_heads=4"], 3, [1, 2]),
}


@pytest.mark.parametrize("case", TENSOR)
def test_tensor_sizes_are_the_divisors_of_the_units(recipe, case):
    pattern, overrides, impossible, possible = TENSOR[case]
    said = problem(lambda: validate(recipe(pattern, *overrides, f"parallel.tensor={impossible}"), impossible))
    assert holds(said, f"parallel.tensor={impossible}")
    assert sizes_offered(said) == possible
    for size in possible:
        validate(recipe(pattern, *overrides, f"parallel.tensor={size}"), size)


def test_tensor_sizes_of_two_kinds_of_layers(recipe):
    """Three units in one layer, twelve in the other: what both can is offered, once."""
    pattern = [*heads(GDN | {"share": 3}, NOPE | {"share": 1}), NOPE]
    said = problem(lambda: validate(recipe(pattern, "parallel.tensor=4"), 4))
    assert sizes_offered(said) == [1, 3]
