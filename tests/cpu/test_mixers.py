"""Both mixers as whole layers, projections included, against the formulas in tests/definitions.py.

Three forms must agree: the mixer's own `reference` and its fast form in float64 to 1e-12, and the fast form in float32, as a training
runs it, within what float32 can hold. Layers are taken from a built model, so the order of the projections' rows is the real one.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hybrid_megatron.config.schema import ModelConfig, ParallelConfig
from hybrid_megatron.model.hybrid_model import build_model
from hybrid_megatron.model.mixers import MIXERS
from hybrid_megatron.model.pattern import Layer, plan_layers
from hybrid_megatron.parallel import SequenceLayout, start
from tests import definitions
from tests.cpu.tiny import tiny_config
from tests.definitions import relative_error

BATCH, LENGTH = 2, 150  # two borders of chunks of 64, and a last chunk that is not full
# name: (layer of the tiny recipe, overrides)
LAYERS = {
    "gdn": (0, []),
    "gdn, negative eigenvalues": (0, ["model.gdn.allow_neg_eigval=true"]),
    "attention, rope": (1, []),
    "attention, rope of another base": (1, ["model.attention.rope_base=100"]),
    "attention, nope": (3, []),
    "attention, nope, one key-value head": (3, ["model.num_kv_heads=1"]),
    "attention, rope, no groups": (1, ["model.num_kv_heads=4"]),
}
# Rows of their own: starts at 0, one after the other, at and across borders of chunks; one row that begins amid a document.
STARTS = {"whole samples": None, "documents": ((0, 1, 2, 64, 100), (50, 128))}


@pytest.fixture(scope="module")
def built(tiny_data):
    """name -> (model config, layer, TransformerLayer with lively parameters in float32)."""
    with start(ParallelConfig(), 0) as state:
        layers = {}
        for name, (place, overrides) in LAYERS.items():
            config = tiny_config(tiny_data, "run_dir=unused", *overrides)
            plan = plan_layers(config)
            block = build_model(config, plan, state).decoder.layers[place]
            random = torch.Generator().manual_seed(3)
            with torch.no_grad():
                for parameter_name, parameter in block.named_parameters():
                    if parameter.dim() == 2:  # of the size that keeps activations at 1; gates then range over their whole domain
                        parameter.normal_(0, 1.5 * parameter.shape[1] ** -0.5, generator=random)
                    elif "norm" in parameter_name:  # all ones would not tell the heads' channels apart
                        parameter.uniform_(0.5, 1.5, generator=random)
            layers[name] = config.model, plan.layers[place], block
        yield layers


def definition(weights: dict[str, Tensor], hidden: Tensor, model: ModelConfig, layer: Layer, starts: Tensor | None) -> Tensor:
    """The whole layer; rows of the input projection come unit by unit, as the mixers' docstrings say."""
    width = model.head_dim
    units = model.num_heads if layer.mixer == "gdn" else (model.num_kv_heads or model.num_heads)
    rows = torch.einsum("bsh,uch->bsuc", hidden, weights["in_proj.weight"].reshape(units, -1, model.hidden_size))
    if layer.mixer == "gdn":
        q, k, v, z = (rows[..., i * width : (i + 1) * width] for i in range(4))
        mixed = definitions.gdn(
            q, k, v, z, rows[..., 4 * width], rows[..., 4 * width + 1],
            A_log=weights["mixer.A_log"], dt_bias=weights["mixer.dt_bias"], norm=weights["mixer.out_norm"],
            norm_eps=model.norm_eps, allow_neg_eigval=model.gdn.allow_neg_eigval, starts=starts,
        )  # fmt: skip
    else:
        group = model.num_heads // units
        queries = [rows[:, :, head // group, head % group * width : (head % group + 1) * width] for head in range(model.num_heads)]
        k, v = (rows[..., (group + i) * width : (group + i + 1) * width] for i in range(2))
        base = model.attention.rope_base if layer.position == "rope" else None
        mixed = definitions.attention(torch.stack(queries, 2), k, v, base=base, starts=starts)
    return torch.einsum("bsc,hc->bsh", mixed.reshape(*hidden.shape[:2], -1), weights["out_proj.weight"])


def starts_of(name: str) -> Tensor | None:
    if STARTS[name] is None:
        return None
    starts = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    for row, places in zip(starts, STARTS[name]):
        row[list(places)] = True
    return starts


def draw_hidden(model: ModelConfig) -> Tensor:
    return torch.randn(BATCH, LENGTH, model.hidden_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def with_gradients(form: Callable, weights: dict[str, Tensor], hidden: Tensor) -> dict[str, Tensor]:
    """Output, and gradients of a random sum of it by the weights and the input."""
    leaves = {name: w.detach().clone().requires_grad_() for name, w in (weights | {"hidden": hidden}).items()}
    o = form({name: leaf for name, leaf in leaves.items() if name != "hidden"}, leaves["hidden"])
    random = torch.randn(o.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (o.double() * random).sum().backward()
    return {"output": o.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


def fast(block, starts: Tensor | None) -> Callable:
    """MixerLayer's forward as a function of its parameters; it takes and gives [s, b, h]."""
    layout = SequenceLayout(LENGTH, document_starts=starts)

    def form(weights: dict[str, Tensor], hidden: Tensor) -> Tensor:
        o, bias = torch.func.functional_call(
            block.self_attention, weights, (hidden.transpose(0, 1).contiguous(),), {"packed_seq_params": layout}
        )
        assert bias is None
        return o.transpose(0, 1)

    return form


def weights_of(block, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: parameter.detach().to(dtype) for name, parameter in block.self_attention.named_parameters()}


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    assert found.keys() == expected.keys()
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    worst = max(errors, key=errors.get)
    assert errors[worst] <= bound, f"{worst}: {errors[worst]:.2e}"


@pytest.fixture(scope="module")
def exact(built) -> Callable:
    """(layer, starts) -> its definition's results, computed once."""
    results = {}

    def of(name: str, starts: str) -> dict[str, Tensor]:
        if (name, starts) not in results:
            model, layer, block = built[name]
            form = lambda weights, hidden: definition(weights, hidden, model, layer, starts_of(starts))  # noqa: E731
            results[name, starts] = with_gradients(form, weights_of(block, torch.float64), draw_hidden(model))
        return results[name, starts]

    return of


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("name", LAYERS)
def test_reference_is_the_definition(built, exact, name, starts):
    model, layer, block = built[name]
    form = lambda weights, hidden: MIXERS[layer.mixer].reference(weights, hidden, model, layer, starts_of(starts))  # noqa: E731
    compare(with_gradients(form, weights_of(block, torch.float64), draw_hidden(model)), exact(name, starts), 1e-12)


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("name", LAYERS)
def test_fast_form_in_float64_is_the_definition(built, exact, name, starts):
    model, _, block = built[name]
    found = with_gradients(fast(block, starts_of(starts)), weights_of(block, torch.float64), draw_hidden(model))
    compare(found, exact(name, starts), 1e-12)


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("name", LAYERS)
def test_fast_form_in_float32(built, name, starts):
    """Outputs: products round by 2^-24 = 6e-8, and sums of 150 add a few of those up, 2e-6. gdn's gradients also see the gates, summed
    over a chunk: a sum G carries |G| 2^-24, and so does the e^(G_t - G_j) that it is for (but for strong gates hardly anything is left)."""
    model, layer, block = built[name]
    hidden = draw_hidden(model).float()
    weights = weights_of(block, torch.float32)
    assert all(w.dtype == torch.float32 for w in weights.values())
    found = with_gradients(fast(block, starts_of(starts)), weights, hidden)
    form = lambda weights, x: definition(weights, x, model, layer, starts_of(starts))  # noqa: E731
    expected = with_gradients(form, weights_of(block, torch.float64), hidden.double())
    compare({"output": found.pop("output")}, {"output": expected.pop("output")}, 2e-6)
    compare(found, expected, 2e-6 if layer.mixer == "attention" else 2e-6 + 2**-24 * largest_sum_of_gates(model, weights, hidden))


def largest_sum_of_gates(model: ModelConfig, weights: dict[str, Tensor], hidden: Tensor) -> float:
    """Largest |G| of 64 tokens' gates in a row, of any head."""
    a = (hidden @ weights["in_proj.weight"].T).unflatten(-1, (model.num_heads, -1))[..., 4 * model.head_dim]
    g, _ = definitions.gdn_gates(a, a, weights["mixer.A_log"], weights["mixer.dt_bias"], False)
    return max(float(-chunk.sum(1).min()) for chunk in g.split(64, 1))


def through_layer(block, hidden: Tensor, starts: Tensor | None) -> Tensor:
    """The whole TransformerLayer, [b, s, h] to [b, s, h]: norms, mixer, SwiGLU, residuals."""
    layout = SequenceLayout(hidden.shape[1], document_starts=starts)
    o, _ = block(hidden.transpose(0, 1).contiguous(), attention_mask=None, packed_seq_params=layout)
    return o.transpose(0, 1)


@pytest.mark.parametrize("lengths", [(40, 24), (50, 70), (64, 64), (1, 149), (30, 60, 60)])
@pytest.mark.parametrize("name", ["gdn", "attention, rope", "attention, nope"])
def test_packed_documents_are_the_documents_apart(built, name, lengths):
    """Documents that end within a chunk of 64, at its border and across it. RoPE counts from the sample's start; only distances matter."""
    model, _, block = built[name]
    block = block.double()
    try:
        hidden = draw_hidden(model)[:1, : sum(lengths)]
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


@pytest.mark.parametrize("name", ["gdn", "attention, rope", "attention, nope"])
def test_later_tokens_do_not_reach_earlier_ones(built, name):
    model, _, block = built[name]
    hidden = draw_hidden(model).float()
    changed = torch.cat((hidden[:, :97], -hidden[:, 97:]), 1)
    before, after = (through_layer(block, x, None) for x in (hidden, changed))
    assert relative_error(after[:, :97], before[:, :97]) <= 1e-6
    assert relative_error(after[:, 97:], before[:, 97:]) > 0.1


def test_nope_sees_no_order_and_rope_does(built):
    """The last token's output after its predecessors trade places."""
    changes = {}
    for name in ("attention, nope", "attention, rope"):
        model, _, block = built[name]
        hidden = draw_hidden(model).float()
        mixed = torch.cat((hidden[:, :-1].flip(1), hidden[:, -1:]), 1)
        changes[name] = relative_error(through_layer(block, mixed, None)[:, -1], through_layer(block, hidden, None)[:, -1])
    assert changes["attention, nope"] <= 1e-6 and changes["attention, rope"] > 1e-2


@pytest.mark.parametrize("name", LAYERS)
def test_bfloat16_stays_near_the_definition(built, name):
    """Gates and states stay float32. Each of the five roundings from the input to the output moves the result by 2^-9 at most: 1e-2."""
    model, layer, block = built[name]
    weights = {
        key: w.float() if key in ("mixer.A_log", "mixer.dt_bias") else w.bfloat16() for key, w in weights_of(block, torch.float64).items()
    }  # fmt: skip
    hidden = draw_hidden(model).bfloat16()
    o = fast(block, None)(weights, hidden)
    assert o.dtype == torch.bfloat16
    expected = definition({key: w.double() for key, w in weights.items()}, hidden.double(), model, layer, None)
    assert relative_error(o, expected) <= 1e-2
