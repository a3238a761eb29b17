"""What mixers keep for the backward pass: split over tensor ranks or whole, and the same in the plan as in the accounts."""

import pytest

from hybrid_megatron.model.accounting import account
from hybrid_megatron.model.mixers import MIXERS
from hybrid_megatron.planning.memory import mixer_bytes
from tests.cpu.plan_cells import layout


@pytest.mark.parametrize("sequence", [False, True])
def test_what_tensor_ranks_keep_whole(sequence):
    """rwkv7: ten activations and a float32 gate by channel, split; three bottlenecks of 192, whole; and the input where it was gathered."""
    of = layout("776m+rwkv7_nope_lh+pretrain_4k", "parallel.tensor=2", f"parallel.sequence={str(sequence).lower()}", gpus=8)
    tokens = of.local_tokens
    expected = tokens * (1536 // 2 * (10 * 2 + 4) + 3 * 192 * 2 + (1536 * 2 if sequence else 0))
    assert mixer_bytes(of, of.plan.layers[0]) == expected


MANY = "train.micro_batch=16"
"""So many heads of samples that none is cut into pieces."""
WHOLE_ROWS = {"gla": 16, "kda": 2 * 128, "rwkv7": 3 * 192}
"""A token's, of a layer: what bottlenecks come down to."""


@pytest.mark.parametrize("mixer", ["gdn", "gla", "kda", "lightning", "mamba2", "rwkv7", "swa"])
def test_everything_else_is_split_over_tensor_ranks(mixer):
    one, two = (layout(f"776m+{mixer}_nope_lh+pretrain_4k", f"parallel.tensor={size}", MANY, gpus=8) for size in (1, 2))
    whole = WHOLE_ROWS.get(mixer, 0) * 2 * one.local_tokens
    assert 2 * (mixer_bytes(two, two.plan.layers[0]) - whole) == mixer_bytes(one, one.plan.layers[0]) - whole


@pytest.mark.parametrize("way", ["lh", "hh"])
@pytest.mark.parametrize("mixer", ["gdn", "gla", "kda", "lightning", "mamba2", "rwkv7", "swa"])
def test_the_plan_and_the_accounts_keep_the_same(mixer, way):
    """On one rank."""
    of = layout(f"776m+{mixer}_nope_{way}+pretrain_4k", MANY, gpus=8)
    kept = account(of.config, of.plan).activation_bytes
    assert sum(mixer_bytes(of, layer) for layer in of.plan.layers) == 16 * sum(kept.values())


@pytest.mark.parametrize(
    "mixer, samples, context, tensor, pieces, gates, columns",
    [
        ("gla", 1, 32_768, 1, 8, 128, 1), ("gla", 2, 4096, 1, 2, 128, 1), ("gla", 8, 4096, 2, 2, 128, 1), ("gla", 8, 4096, 1, 1, 0, 0),
        ("gdn", 1, 32_768, 1, 8, 1, 128), ("lightning", 1, 32_768, 1, 8, 0, 0), ("mamba2", 1, 16_384, 1, 8, 1, 1),
        ("rwkv7", 1, 32_768, 1, 1, 0, 0), ("swa", 1, 32_768, 1, 1, 0, 0),
    ],
)  # fmt: skip
def test_samples_in_pieces(mixer, samples, context, tensor, pieces, gates, columns):
    """Up to 128 heads of pieces of 2,048 tokens or more: of each head and piece the sums of 128 x 128 and the state before it, and what it
    does to that; of each token the gates that FLA's kernel keeps sums of alone. No tensor rank keeps anything twice."""
    words = [f"train.micro_batch={samples}", f"train.context={context}", f"parallel.tensor={tensor}", "train.batch_tokens=1_048_576"]
    of = layout(f"776m+{mixer}_nope_lh+pretrain_4k", *words, gpus=8)
    group = of.plan.layers[0].groups[0]
    alone = MIXERS[mixer].activation_bytes(of.config.model, group, of.local_tokens, 2)
    whole = MIXERS[mixer].whole_activation_bytes(of.config.model, group, of.local_tokens, 2)
    more = samples * 12 // tensor * (4 * gates * context + pieces * 128 * (2 * 128 + columns) * 4) if pieces > 1 else 0
    assert mixer_bytes(of, of.plan.layers[0]) == (alone - whole) // tensor + whole + more
