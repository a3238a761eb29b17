"""Every mixer, option and mix of heads as a whole layer, projections included, against the formulas in tests/definitions.py.

Three forms must agree: `layer_reference` and the fast form in float64 to 1e-12, and the fast form in float32, as a training runs it,
within what float32 can hold. Layers are taken from built models, so the order of the projections' rows is the real one.
"""

import json
import math
from collections.abc import Callable
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hybrid_megatron.config import RunConfig
from hybrid_megatron.config.schema import ParallelConfig
from hybrid_megatron.model.hybrid_model import build_model
from hybrid_megatron.model.mixer_layer import layer_reference
from hybrid_megatron.model.pattern import Layer, plan_layers
from hybrid_megatron.parallel import SequenceLayout, start
from tests import definitions
from tests.cpu.mixer_layers import HEADS, LAYERS, LENGTHS, LINEAR, MIXES, PLAIN
from tests.cpu.tiny import tiny_config
from tests.definitions import Group, relative_error

BATCH = 2
# Rows of their own: starts at 0, one after the other, at and across borders of chunks; one row that begins amid a document.
STARTS = {"whole samples": None, "documents": ((0, 1, 2, 64, 100), (50, 128))}


class Built(NamedTuple):
    config: RunConfig
    groups: list[Group]
    layer: Layer
    block: torch.nn.Module
    """The TransformerLayer, with lively parameters in float32."""


def layer_config(tiny_data, name: str, *overrides: str) -> RunConfig:
    entry, settings = LAYERS[name]
    words = [f"pattern={json.dumps([entry])}", "model.num_layers=1", f"model.num_heads={HEADS}", "model.num_kv_heads=null"]
    return tiny_config(tiny_data, "run_dir=unused", *words, *(f"model.{setting}" for setting in settings), *overrides)


@pytest.fixture(scope="module")
def state():
    with start(ParallelConfig(), 0) as state:
        yield state


@pytest.fixture(scope="module")
def built(state, tiny_data) -> Callable[[str], Built]:
    layers: dict[str, Built] = {}

    def of(name: str) -> Built:
        if name not in layers:
            config = layer_config(tiny_data, name)
            plan = plan_layers(config)
            [block] = build_model(config, plan, state).decoder.layers
            enliven(block)
            layers[name] = Built(config, groups_of(config, LAYERS[name][0]), plan.layers[0], block)
        return layers[name]

    return of


@torch.no_grad()
def enliven(block: torch.nn.Module) -> None:
    """Parameters that let every part be seen: matrices of the size that keeps activations at 1, so that gates range over their domain."""
    random = torch.Generator().manual_seed(3)
    for name, parameter in block.named_parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, 1.5 * parameter.shape[1] ** -0.5, generator=random)
        elif "norm" in name or name.endswith(".D"):  # all ones would not tell the heads or their channels apart
            parameter.uniform_(0.5, 1.5, generator=random)
        elif name.endswith(("gate_bias", "z_bias", "r_k")):  # and zeros, or next to it, would not be missed
            parameter.normal_(0, 1, generator=random)


def groups_of(config: RunConfig, entry: dict) -> list[Group]:
    """The groups of heads that an entry of a pattern means."""
    model, listed = config.model, entry.get("heads", [entry | {"share": 1}])
    whole = sum(part["share"] for part in listed)
    groups = []
    for part in listed:
        mixer, heads = part["mixer"], HEADS * part["share"] // whole
        options = getattr(model, mixer)
        of_full_layer = (model.num_kv_heads if mixer in ("attention", "swa") else getattr(options, "num_kv_heads", None)) or HEADS
        position = part.get("position", "rope" if mixer in ("swa", "lightning") else "nope")
        own = {"swa": ["window"], "gla": ["gate_rank", "gate_temperature"], "gdn": ["allow_neg_eigval"], "kda": ["allow_neg_eigval"]}.get(
            mixer, []
        )
        own += [] if mixer in ("attention", "swa", "rwkv7") else ["short_conv"]
        groups.append(
            Group(
                mixer, heads, kv_heads=heads * of_full_layer // HEADS, head_dim=model.head_dim, norm_eps=model.norm_eps,
                rope_base=options.rope_base if position == "rope" else None, qk_norm=getattr(options, "qk_norm", False),
                output_gate=getattr(options, "output_gate", "none"), **{name: getattr(options, name) for name in own},
            )
        )  # fmt: skip
    return groups


def starts_of(starts: str, length: int) -> Tensor | None:
    if STARTS[starts] is None:
        return None
    return torch.tensor([[place in row for place in range(length)] for row in STARTS[starts]])


def draw_hidden(config: RunConfig, length: int) -> Tensor:
    """Values that float32 holds, so that all forms see the same."""
    return torch.randn(BATCH, length, config.model.hidden_size, generator=torch.Generator().manual_seed(1)).double()


def with_gradients(form: Callable, weights: dict[str, Tensor], hidden: Tensor) -> dict[str, Tensor]:
    """Output, and gradients of a random sum of it by the weights and the input."""
    leaves = {name: w.detach().clone().requires_grad_() for name, w in (weights | {"hidden": hidden}).items()}
    o = form({name: leaf for name, leaf in leaves.items() if name != "hidden"}, leaves["hidden"])
    random = torch.randn(o.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (o.double() * random).sum().backward()
    return {"output": o.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


def fast(block, starts: Tensor | None) -> Callable:
    """MixerLayer's forward as a function of its parameters; it takes and gives [s, b, h]."""

    def form(weights: dict[str, Tensor], hidden: Tensor) -> Tensor:
        layout = SequenceLayout(hidden.shape[1], document_starts=starts)
        o, bias = torch.func.functional_call(
            block.self_attention, weights, (hidden.transpose(0, 1).contiguous(),), {"packed_seq_params": layout}
        )
        assert bias is None
        return o.transpose(0, 1)

    return form


def weights_of(block, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: parameter.detach().to(dtype) for name, parameter in block.self_attention.named_parameters()}


def errors_of(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys()
    return {name: relative_error(found[name], expected[name]) for name in expected}


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    errors = errors_of(found, expected)
    worst = max(errors, key=errors.get)
    assert errors[worst] <= bound, f"{worst}: {errors[worst]:.2e}"


@pytest.fixture(scope="module")
def exact(built) -> Callable:
    """(layer, starts) -> its definition's results, computed once."""
    results = {}

    def of(name: str, starts: str) -> dict[str, Tensor]:
        if (name, starts) not in results:
            config, groups, _, block = built(name)
            places = starts_of(starts, LENGTHS[name])
            form = lambda weights, hidden: definitions.mixing_layer(weights, hidden, groups, places)  # noqa: E731
            results[name, starts] = with_gradients(form, weights_of(block, torch.float64), draw_hidden(config, LENGTHS[name]))
        return results[name, starts]

    return of


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("name", LAYERS)
def test_reference_is_the_definition(built, exact, name, starts):
    config, _, layer, block = built(name)
    places = starts_of(starts, LENGTHS[name])
    form = lambda weights, hidden: layer_reference(weights, hidden, config.model, layer, places)  # noqa: E731
    compare(with_gradients(form, weights_of(block, torch.float64), draw_hidden(config, LENGTHS[name])), exact(name, starts), 1e-12)


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("name", LAYERS)
def test_fast_form_in_float64_is_the_definition(built, exact, name, starts):
    config, _, _, block = built(name)
    form = fast(block, starts_of(starts, LENGTHS[name]))
    compare(with_gradients(form, weights_of(block, torch.float64), draw_hidden(config, LENGTHS[name])), exact(name, starts), 1e-12)


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("name", LAYERS)
def test_fast_form_in_float32(built, exact, name, starts):
    """Outputs: products round by 2^-24 = 6e-8, and sums of 150 add a few of those up, 2e-6. Gradients of linear mixers also see the gates,
    summed over a chunk: a sum G carries |G| 2^-24, and so does the e^(G_t - G_j) that it is for (but for strong gates hardly anything is
    left). What is beyond that must be the formulas' own doing, see `sensitivity`."""
    config, groups, _, block = built(name)
    hidden = draw_hidden(config, LENGTHS[name])
    weights = weights_of(block, torch.float32)
    assert all(w.dtype == torch.float32 for w in weights.values())
    places = starts_of(starts, LENGTHS[name])
    found, expected = with_gradients(fast(block, places), weights, hidden.float()), exact(name, starts)
    errors = errors_of(found, expected)
    assert errors.pop("output") <= 2e-6
    bound = 2e-6 + 2**-24 * largest_sum_of_gates(groups, weights_of(block, torch.float64), hidden)
    beyond = {name: error for name, error in errors.items() if error > bound}
    if beyond:
        moved = sensitivity(lambda w, x: definitions.mixing_layer(w, x, groups, places), weights_of(block, torch.float64), hidden, expected)
        for name, error in beyond.items():
            assert error <= bound + 8 * moved[name], f"{name}: {error:.2e}, where a rounding of the input moves it by {moved[name]:.2e}"


def sensitivity(form: Callable, weights: dict[str, Tensor], hidden: Tensor, expected: dict[str, Tensor]) -> dict[str, float]:
    """How far results move, in float64, when every parameter and input moves by at most 2^-24 of itself: the most of four random draws.

    An output norm divides by what its head's sum has come to; where that sum has cancelled, as q k^T of a document's first token may have,
    the gradient through it knows few digits, in whatever form it is computed.
    """
    random = torch.Generator().manual_seed(4)

    def rounded(x: Tensor) -> Tensor:
        return x * (1 + 2**-24 * (2 * torch.rand(x.shape, generator=random, dtype=torch.float64) - 1))

    draws = [with_gradients(form, {name: rounded(w) for name, w in weights.items()}, rounded(hidden)) for _ in range(4)]
    return {name: max(relative_error(draw[name], expected[name]) for draw in draws) for name in expected}


def largest_sum_of_gates(groups: list[Group], weights: dict[str, Tensor], hidden: Tensor) -> float:
    """Largest |G| of 64 tokens' gates in a row, of any head."""
    sums = [0.0]
    for i, (group, x) in enumerate(zip(groups, definitions.layer_parts(weights, hidden, groups))):
        if group.mixer in LINEAR:
            gates = definitions.log_gates(x, definitions.own_weights(weights, i), group)
            sums += [float(-chunk.sum(1).min()) for chunk in gates.split(64, 1)]
    return max(sums)


@pytest.mark.parametrize("name", LAYERS)
def test_bfloat16_stays_near_the_definition(built, state, tiny_data, name):
    """Gates and states stay float32. Between the input and the output stand five to nine roundings (projections, convolution, SiLU, norms,
    recurrence, gate), each of 2^-9 = 2e-3 at most and at random: 1e-2."""
    config, groups, _, block = built(name)
    narrow_config = layer_config(tiny_data, name, "train.precision=bf16")
    [narrow] = build_model(narrow_config, plan_layers(narrow_config), state).decoder.layers
    dtypes = {key: parameter.dtype for key, parameter in narrow.self_attention.named_parameters()}
    wide = ("A_log", "dt_bias", "gate_bias", "decay_bias", "rate_bias", ".D")
    assert all(dtype == (torch.float32 if key.endswith(wide) else torch.bfloat16) for key, dtype in dtypes.items())
    weights = {key: w.to(dtypes[key]) for key, w in weights_of(block, torch.float64).items()}
    hidden = draw_hidden(config, LENGTHS[name]).bfloat16()
    o = fast(narrow, None)(weights, hidden)
    assert o.dtype == torch.bfloat16
    expected = definitions.mixing_layer({key: w.double() for key, w in weights.items()}, hidden.double(), groups)
    assert relative_error(o, expected) <= 1e-2


def test_recurrences_take_their_gates_in_float32(state, tiny_data, monkeypatch):
    """In bfloat16 the sum of a chunk's gates would know two digits; 1e-2 above would not see it here, a long sample would."""
    taken = {}

    def spied(mixer) -> Callable:
        def recur(recurrence, inputs, *more):
            taken[mixer.group.mixer] = [x.dtype for x in inputs]
            return original(recurrence, inputs, *more)

        original = mixer._recur
        return recur

    for name in ("all mixers, all options", "kda 2 : gla 1 : mamba2 1", "gla 1 : rwkv7 1"):
        config = layer_config(tiny_data, name, "train.precision=bf16")
        [narrow] = build_model(config, plan_layers(config), state).decoder.layers
        for mixer in narrow.self_attention.mixers:
            if mixer.group.mixer in LINEAR:
                monkeypatch.setattr(mixer, "_recur", spied(mixer))
        through_layer(narrow, draw_hidden(config, 70).bfloat16(), None)
    vectors = [torch.bfloat16] * 3
    gates = {"gla": 1, "gdn": 2, "kda": 2, "lightning": 0, "mamba2": 1}
    expected = {mixer: vectors + [torch.float32] * count for mixer, count in gates.items()}
    assert taken == expected | {"rwkv7": [*vectors, torch.float32, *vectors[:2]]}


def through_layer(block, hidden: Tensor, starts: Tensor | None) -> Tensor:
    """The whole TransformerLayer, [b, s, h] to [b, s, h]: norms, mixer, SwiGLU, residuals."""
    layout = SequenceLayout(hidden.shape[1], document_starts=starts)
    o, _ = block(hidden.transpose(0, 1).contiguous(), attention_mask=None, packed_seq_params=layout)
    return o.transpose(0, 1)


PACKED = [
    *PLAIN,
    "gla, rope",
    "gla, all together",
    "gla, convolution",
    "gdn, all together",
    "kda, all together",
    "lightning, all together",
    "mamba2, all together",
    "gdn 2 : swa 1 : attention 1",
    "all mixers, all options",
]


@pytest.mark.parametrize("lengths", [(40, 24), (50, 70), (64, 64), (1, 149), (30, 60, 60)])
@pytest.mark.parametrize("name", PACKED)
def test_packed_documents_are_the_documents_apart(built, name, lengths):
    """Documents that end within a chunk of 64, at its border and across it. RoPE counts from the sample's start; only distances matter."""
    config, _, _, block = built(name)
    block = block.double()
    try:
        hidden = draw_hidden(config, sum(lengths))[:1]
        starts = torch.zeros(1, sum(lengths), dtype=torch.bool)
        starts[0, [sum(lengths[:i]) for i in range(len(lengths))]] = True
        weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        together, apart = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
        packed = through_layer(block, together, starts)
        (packed * weights).sum().backward()
        gradients = [p.grad.clone() for p in block.parameters()]
        block.zero_grad()
        alone = torch.cat([through_layer(block, document, None) for document in apart.split(lengths, dim=1)], 1)
        (alone * weights).sum().backward()
        assert relative_error(packed, alone) <= 1e-12
        assert relative_error(together.grad, apart.grad) <= 1e-12
        for mine, parameter in zip(gradients, block.parameters()):
            assert relative_error(mine, parameter.grad) <= 1e-12
        second = slice(lengths[0], None)
        leaking = through_layer(block, hidden, None)
        assert relative_error(leaking[:, second], alone[:, second]) > 1e-4, "without document starts the first leaks into the second"
    finally:
        block.zero_grad()
        block.float()


@pytest.mark.parametrize("name", PACKED)
def test_later_tokens_do_not_reach_earlier_ones(built, name):
    config, _, _, block = built(name)
    hidden = draw_hidden(config, 150).float()
    changed = torch.cat((hidden[:, :97], -hidden[:, 97:]), 1)
    before, after = (through_layer(block, x, None) for x in (hidden, changed))
    assert relative_error(after[:, :97], before[:, :97]) <= 1e-6
    assert relative_error(after[:, 97:], before[:, 97:]) > 0.1


@pytest.mark.parametrize("window", [1, 16, 64])
def test_a_window_ends_where_it_says(state, tiny_data, window):
    """A token's output moves with the token window - 1 places before it, and not with the one before that."""
    config = layer_config(tiny_data, "swa", f"model.swa.window={window}")
    [block] = build_model(config, plan_layers(config), state).decoder.layers
    enliven(block)
    hidden = draw_hidden(config, 100).float()
    last = through_layer(block, hidden, None)[:, -1]
    for distance, seen in ((window - 1, True), (window, False)):
        changed = hidden.clone()
        changed[:, 99 - distance] *= -1
        moved = relative_error(through_layer(block, changed, None)[:, -1], last)
        assert moved > 1e-3 if seen else moved <= 1e-6


def test_nope_sees_no_order_and_the_others_do(built):
    """The last token's output after its predecessors trade places."""
    changes = {}
    for name in (*PLAIN, "gdn 2 : swa 1 : attention 1"):
        config, _, _, block = built(name)
        hidden = draw_hidden(config, 64).float()
        mixed = torch.cat((hidden[:, :-1].flip(1), hidden[:, -1:]), 1)
        changes[name] = relative_error(through_layer(block, mixed, None)[:, -1], through_layer(block, hidden, None)[:, -1])
    assert changes.pop("attention, nope") <= 1e-6
    assert min(changes.values()) > 1e-2, changes


def test_every_head_of_a_mix_has_its_own_place(built):
    """Silencing one unit's rows silences that unit's columns alone: what a tensor rank holds depends on nothing another rank holds."""
    for name in MIXES:
        config, groups, _, block = built(name)
        hidden = draw_hidden(config, 20)
        weights = weights_of(block, torch.float64)
        count = math.gcd(*(group.kv_heads for group in groups))
        rows, columns = weights["in_proj.weight"].shape[0] // count, weights["out_proj.weight"].shape[1] // count
        for kept in range(count):
            alone = {key: w.clone() for key, w in weights.items()}
            alone["out_proj.weight"][:, : kept * columns] = 0
            alone["out_proj.weight"][:, (kept + 1) * columns :] = 0
            silent = {key: w.clone() for key, w in alone.items()}
            silent["in_proj.weight"][: kept * rows] = 0
            silent["in_proj.weight"][(kept + 1) * rows :] = 0
            form = fast(block, None)
            assert relative_error(form(silent, hidden), form(alone, hidden)) <= 1e-12, f"{name}, unit {kept}"
            assert float(form(alone, hidden).norm()) > 1e-3


def test_the_output_projection_takes_a_mixers_output_as_it_lies(built):
    """Sequence first in memory: it is not copied once more."""
    config, _, _, block = built("gdn")
    layer, made, taken = block.self_attention, [], []

    def turned(parts: dict[str, Tensor], layout: SequenceLayout, mix=layer.mixers[0].mix) -> Tensor:
        made.append(mix(parts, layout).transpose(0, 1).contiguous())
        return made[0].transpose(0, 1)

    hook = layer.out_proj.register_forward_pre_hook(lambda module, inputs: taken.append(inputs[0]))
    with patch.object(layer.mixers[0], "mix", turned):
        through_layer(block, draw_hidden(config, 20).float(), None)
    hook.remove()
    assert taken[0].is_contiguous() and taken[0].data_ptr() == made[0].data_ptr()


@pytest.mark.parametrize("name", ["attention, nope", "attention, QK norm", "swa, nope"])
def test_queries_keep_the_order_of_the_projection(built, name):
    """Attention on CUDA gives its output the order of q, and the output projection takes it sequence first."""
    config, _, _, block = built(name)
    mixer, seen = block.self_attention.mixers[0], []

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, attend=mixer.attend) -> Tensor:
        seen.append(q)
        return attend(q, k, v, layout)

    with patch.object(mixer, "attend", attend):
        through_layer(block, draw_hidden(config, 20).float(), None)
    assert seen[0].shape[:2] == (BATCH, 20) and seen[0].stride(1) > seen[0].stride(0)
