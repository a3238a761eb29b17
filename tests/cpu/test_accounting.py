"""Parameters and FLOPs against closed forms written out here, and against built models."""

import pytest

from hybrid_megatron.config import load_recipe
from hybrid_megatron.config.schema import ParallelConfig
from hybrid_megatron.model.accounting import Accounts, account
from hybrid_megatron.model.hybrid_model import build_model
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.parallel import start
from tests.cpu.tiny import tiny_config
from tests.cpu.zoo import MIXED

VOCAB = 128_256
# layers, hidden, heads of 128, FFN, total with attention everywhere in millions
MODELS = {
    "376m": (8, 1024, 8, 3264, 376.5),
    "776m": (12, 1536, 12, 4864, 776.2),
    "1b": (16, 2048, 16, 6528, 1436),
    "3b": (24, 3072, 24, 9728, 3846),
}


def accounts(*words: str) -> Accounts:
    config = load_recipe([*words, "data.train=unused"])
    return account(config, plan_layers(config))


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_the_models(name):
    layers, hidden, heads, ffn, millions = MODELS[name]
    assert heads * 128 == hidden
    found = accounts(f"{name}+rope+pretrain_4k").total_params
    block = 4 * hidden * hidden + 3 * hidden * ffn + 2 * hidden  # q k v o, SwiGLU, two norms
    assert found == layers * block + 2 * VOCAB * hidden + hidden
    assert round(found / 1e6, 1 if millions < 1000 else 0) == millions


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_hybrids(name):
    """A GDN layer: q, k, v, output gate and output projection as wide as the model, two gates a head, A_log, dt_bias, one norm of 128."""
    layers, hidden, heads, ffn, _ = MODELS[name]
    gdn = 5 * hidden * hidden + 2 * heads * hidden + 2 * heads + 128
    attention = 4 * hidden * hidden
    common = layers * (3 * hidden * ffn + 2 * hidden) + hidden + 2 * VOCAB * hidden
    for pattern in ("gdn_nope_lh", "gdn_rope_lh"):
        found = accounts(f"{name}+{pattern}+pretrain_4k")
        assert found.total_params == layers * 3 // 4 * gdn + layers // 4 * attention + common
        assert found.params["gdn"] == layers * 3 // 4 * gdn and found.params["attention"] == layers // 4 * attention
    assert accounts(f"{name}+rope_nope_lh+pretrain_4k").total_params == layers * attention + common


@pytest.mark.parametrize("context", [4096, 32_768])
@pytest.mark.parametrize("name", MODELS)
def test_flops_of_attention(name, context):
    """Forward and backward are six FLOPs a weight of a matrix, the embedding is none, and q k^T and p v are two products over t + 1 keys
    for token t: together 3 * 2 * 2 * hidden * (context + 1) / 2 a token and layer."""
    layers, hidden, _, ffn, _ = MODELS[name]
    weights = layers * (4 * hidden * hidden + 3 * hidden * ffn) + VOCAB * hidden
    keys = sum(t + 1 for t in range(context)) / context
    expected = 6 * weights + layers * 12 * hidden * keys
    assert accounts(f"{name}+rope+pretrain_4k", f"train.context={context}").flops_per_token == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("context", [4096, 32_768])
@pytest.mark.parametrize("name", MODELS)
def test_flops_of_hybrids(name, context):
    """The delta rule touches each element of a head's 128 x 128 state with three multiply-adds a token, whatever the context."""
    layers, hidden, heads, ffn, _ = MODELS[name]
    linear, full = layers * 3 // 4, layers // 4
    weights = linear * (5 * hidden * hidden + 2 * heads * hidden) + full * 4 * hidden * hidden + layers * 3 * hidden * ffn + VOCAB * hidden
    expected = 6 * weights + linear * 3 * 3 * 2 * heads * 128 * 128 + full * 12 * hidden * (context + 1) / 2
    found = accounts(f"{name}+gdn_nope_lh+pretrain_4k", f"train.context={context}")
    assert found.flops_per_token == pytest.approx(expected, rel=1e-12)
    assert set(found.forward_flops_per_token) == {"gdn", "attention", "mlp", "output_layer"}


def test_flops_of_grouped_queries():
    """Fewer key-value heads spare projections, not scores: k and v are a quarter as wide."""
    hidden, layers = 1024, 8
    whole, grouped = (accounts("376m+rope+pretrain_4k", *more).flops_per_token for more in ([], ["model.num_kv_heads=2"]))
    assert whole - grouped == pytest.approx(6 * layers * 2 * hidden * hidden * 3 / 4, rel=1e-9)


def test_flops_of_longce():
    """27 windows of 5,120 tokens in 32,768 (28 less the one at the start), forward alone, 1,024 tokens of each through the output layer."""
    layers, hidden, heads, ffn, _ = MODELS["776m"]
    words = ["776m+gdn_nope_lh+pretrain_4k", "train.context=32768"]
    plain, found = accounts(*words), accounts(*words, "longce.enabled=true")
    linear, full = layers * 3 // 4, layers // 4
    weights = linear * (5 * hidden**2 + 2 * heads * hidden) + full * 4 * hidden**2 + layers * 3 * hidden * ffn
    token = 2 * weights + linear * 3 * 2 * heads * 128**2 + full * 4 * hidden * (5120 + 1) / 2
    expected = 27 * (5120 * token + 1024 * 2 * VOCAB * hidden) / 32_768
    assert found.short_flops_per_token == pytest.approx(expected, rel=1e-12) and plain.short_flops_per_token == 0
    assert found.flops_per_token == pytest.approx(plain.flops_per_token + expected, rel=1e-12)
    assert found.forward_flops_per_token == plain.forward_flops_per_token
    other = accounts(*words, "longce.enabled=true", "longce.window=1024", "longce.stride=1024").short_flops_per_token
    assert 0.40 < other / expected < 0.55, "30 windows of 2,048"


HYBRIDS = {
    # parameters of one layer of all heads: from hidden, heads (of 128), and FLOPs of its mixing for one token of a sample of `context`
    "swa": (
        lambda hidden, heads: 4 * hidden**2,
        lambda hidden, heads, context: 4 * hidden * (128 * 129 / 2 + (context - 128) * 128) / context,
    ),
    "gla": (
        lambda hidden, heads: 5 * hidden**2 + 2 * 16 * hidden + hidden + 128,  # two matrices of the gate, its bias, a norm
        lambda hidden, heads, context: 2 * (2 * heads * 128**2 + 16 * hidden),
    ),
    "gdn": (lambda hidden, heads: 5 * hidden**2 + 2 * heads * hidden + 2 * heads + 128, lambda hidden, heads, context: 6 * heads * 128**2),
    "kda": (
        # q, k, v, o; both bottlenecks; beta; A, dt_bias, the output gate's bias, a norm
        lambda hidden, heads: 4 * hidden**2 + 4 * 128 * hidden + heads * hidden + heads + 2 * hidden + 128,
        lambda hidden, heads, context: 6 * heads * 128**2 + 2 * 2 * 128 * hidden,
    ),
    "lightning": (lambda hidden, heads: 5 * hidden**2 + 3 * 128, lambda hidden, heads, context: 4 * heads * 128**2),
    "mamba2": (
        lambda hidden, heads: 5 * hidden**2 + heads * hidden + 3 * heads + 128,  # W_dt; A, dt_bias, D, a norm
        lambda hidden, heads, context: 4 * heads * 128**2 + 2 * hidden,
    ),
    "rwkv7": (
        lambda hidden, heads: 4 * hidden**2 + 2 * 3 * 192 * hidden + (7 + 6) * hidden,  # three bottlenecks of 192, and vectors
        lambda hidden, heads, context: 8 * heads * 128**2,
    ),
}


@pytest.mark.parametrize("context", [4096, 32_768])
@pytest.mark.parametrize("mixer", HYBRIDS)
def test_hybrids_of_776m(mixer, context):
    """Layer-wise and head-wise 3:1. A head-wise layer has its norms, the bottlenecks' first matrices and rwkv7's mixes whole, and three
    quarters of everything else."""
    layers, hidden, heads, ffn, _ = MODELS["776m"]
    common = layers * (3 * hidden * ffn + 2 * hidden) + hidden + 2 * VOCAB * hidden
    of_layer, of_token = HYBRIDS[mixer]
    found = accounts(f"776m+{mixer}_nope_lh+pretrain_4k", f"train.context={context}")
    assert found.params[mixer] == 9 * of_layer(hidden, heads) and found.params["attention"] == 3 * 4 * hidden**2
    assert found.total_params == common + found.params[mixer] + found.params["attention"]

    head_wise = accounts(f"776m+{mixer}_nope_hh+pretrain_4k", f"train.context={context}")
    whole = {"swa": 0, "gla": 128 + 16 * hidden, "gdn": 128, "kda": 128 + 2 * 128 * hidden, "lightning": 3 * 128, "mamba2": 128}
    whole = (whole | {"rwkv7": (3 * 192 + 6) * hidden})[mixer]
    assert head_wise.params[mixer] == 12 * (3 * (of_layer(hidden, heads) - whole) // 4 + whole)
    assert head_wise.params["attention"] == 12 * hidden**2

    vectors = {"swa": 0, "gla": hidden, "gdn": 2 * heads, "kda": heads + 2 * hidden, "lightning": 2 * 128, "mamba2": 3 * heads}
    vectors = (vectors | {"rwkv7": 13 * hidden})[mixer] + (128 if mixer not in ("swa", "rwkv7") else 0)
    gate_up = {"gla": 16 * hidden, "kda": 2 * 128 * hidden}.get(mixer, 0)  # counted in of_token
    layer = 2 * (of_layer(hidden, heads) - vectors - gate_up) + of_token(hidden, heads, context)
    assert found.forward_flops_per_token[mixer] == pytest.approx(9 * layer, rel=1e-9)


def test_state_bytes():
    """Linear mixers: float32 states of 128 x 128 a head at any length; rwkv7 the last token too. Softmax: keys and values, 2 bytes, all or
    the window's."""
    for context in (4096, 65_536):
        for mixer, expected in (
            ("gdn", 9 * 12 * 128 * 128 * 4),
            ("gla", 9 * 12 * 128 * 128 * 4),
            ("kda", 9 * 12 * 128 * 128 * 4),
            ("lightning", 9 * 12 * 128 * 128 * 4),
            ("mamba2", 9 * 12 * 128 * 128 * 4),
            ("rwkv7", 9 * (12 * 128 * 128 * 4 + 1536 * 2)),
            ("swa", 9 * 128 * 2 * 1536 * 2),
        ):
            found = accounts(f"776m+{mixer}_nope_lh+pretrain_4k", f"train.context={context}").state_bytes
            assert found == {mixer: expected, "attention": 3 * context * 2 * 1536 * 2}
    grouped = accounts("776m+swa_nope_hh+pretrain_4k", "model.num_kv_heads=4").state_bytes
    assert grouped == {"swa": 12 * 128 * 2 * 3 * 128 * 2, "attention": 12 * 4096 * 2 * 1 * 128 * 2}
    convolved = accounts("776m+gdn_nope_lh+pretrain_4k", "model.gdn.short_conv=4").state_bytes["gdn"]
    assert convolved == 9 * (12 * 128 * 128 * 4 + 3 * 3 * 1536 * 2)


def test_communication_bytes_at_32k():
    """776m, context 2, bf16. State passing: two summaries of the other rank; 12 heads of 128 x (128 + transition) in float32."""
    for mixer, columns in (("gdn", 128), ("gla", 1), ("kda", 128), ("lightning", 0), ("mamba2", 1)):
        words = [f"776m+{mixer}_nope_lh+pretrain_4k", "train.context=65_536", "parallel.context=2"]
        states = accounts(*words).context_bytes[mixer]
        assert states == 9 * 2 * 12 * 128 * (128 + columns) * 4
        exchanged = accounts(*words, "parallel.context_linear=all_to_all").context_bytes[mixer]
        gates = {"gdn": 2 * 4, "gla": 128 * 4, "kda": 129 * 4, "lightning": 0, "mamba2": 4}[mixer]
        assert exchanged == 9 * 32_768 // 2 * 12 * (4 * 128 * 2 + gates)
        assert exchanged > 10 * states
    shifted = accounts("776m+rwkv7_nope_lh+pretrain_4k", "train.context=65_536", "parallel.context=2").context_bytes["rwkv7"]
    assert shifted == 9 * (1536 * 2 + 2 * 12 * 128 * 256 * 4), "each rank lacks the token before one of its chunks"
    windows = accounts("776m+swa_nope_lh+pretrain_4k", "train.context=65_536", "parallel.context=2").context_bytes
    assert windows["swa"] == 9 * 2 * 1536 * 2 * 127, "rank 0 needs the halo of its back chunk; its front one has none"
    assert windows["attention"] == 3 * 32_768 * 2 * 1536 * 2


VARIANTS = {
    "the tiny recipe": [],
    "no groups": ["model.num_kv_heads=4"],
    "one key-value head": ["model.num_kv_heads=1"],
    "heads wider than hidden": ["model.head_dim=24"],
    "negative eigenvalues": ["model.gdn.allow_neg_eigval=true"],
    "odd sizes": ["model.hidden_size=36", "model.ffn_size=50", "model.vocab_size=257"],
    "all mixers, LH": MIXED["all mixers, LH"],
    "all mixers, HH": MIXED["all mixers, HH"],
    "all options, HH": MIXED["all options, HH"],
}


def test_built_models_have_as_many_parameters(tiny_data):
    with start(ParallelConfig(), 0) as state:
        for name, overrides in VARIANTS.items():
            config = tiny_config(tiny_data, "run_dir=unused", *overrides)
            plan = plan_layers(config)
            model = build_model(config, plan, state)
            counted = account(config, plan)
            assert sum(p.numel() for p in model.parameters()) == counted.total_params, name
            by_part = {
                "embedding": model.embedding.parameters(),
                "output_layer": model.output_layer.parameters(),
                "mlp": [p for layer in model.decoder.layers for p in layer.mlp.parameters()],
            }
            for mixer in plan.mixers:  # where it has a layer of its own
                alone = [i for i, layer in enumerate(plan) if {group.mixer for group in layer.groups} == {mixer}]
                if len(alone) == sum(mixer in {group.mixer for group in layer.groups} for layer in plan):
                    by_part[mixer] = [p for i in alone for p in model.decoder.layers[i].self_attention.parameters()]
            for part, parameters in by_part.items():
                assert sum(p.numel() for p in parameters) == counted.params[part], f"{name}: {part}"
