"""What mixers keep for the backward pass: split over tensor ranks or whole, and the same in the plan as in the accounts."""

import pytest

from hybrid_megatron.config import load_recipe
from hybrid_megatron.model.accounting import account
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.planning.layout import Layout
from hybrid_megatron.planning.memory import mixer_bytes


def layout(*words: str) -> Layout:
    config = load_recipe(list(words), beneath={"data": {"train": "unset"}})
    return Layout(config, plan_layers(config), 8)


@pytest.mark.parametrize("sequence", [False, True])
def test_what_tensor_ranks_keep_whole(sequence):
    """rwkv7: ten activations and a float32 gate by channel, split; three bottlenecks of 192, whole; and the input where it was gathered."""
    of = layout("776m+rwkv7_nope_lh+pretrain_4k", "parallel.tensor=2", f"parallel.sequence={str(sequence).lower()}")
    tokens = of.local_tokens
    expected = tokens * (1536 // 2 * (10 * 2 + 4) + 3 * 192 * 2 + (1536 * 2 if sequence else 0))
    assert mixer_bytes(of, of.plan.layers[0]) == expected


WHOLE_ROWS = {"gla": 16, "kda": 2 * 128, "rwkv7": 3 * 192}
"""A token's, of a layer: what bottlenecks come down to."""


@pytest.mark.parametrize("mixer", ["gdn", "gla", "kda", "lightning", "mamba2", "rwkv7", "swa"])
def test_everything_else_is_split_over_tensor_ranks(mixer):
    one, two = (layout(f"776m+{mixer}_nope_lh+pretrain_4k", f"parallel.tensor={size}") for size in (1, 2))
    whole = WHOLE_ROWS.get(mixer, 0) * 2 * one.local_tokens
    assert 2 * (mixer_bytes(two, two.plan.layers[0]) - whole) == mixer_bytes(one, one.plan.layers[0]) - whole


@pytest.mark.parametrize("way", ["lh", "hh"])
@pytest.mark.parametrize("mixer", ["gdn", "gla", "kda", "lightning", "mamba2", "rwkv7", "swa"])
def test_the_plan_and_the_accounts_keep_the_same(mixer, way):
    """On one rank."""
    of = layout(f"776m+{mixer}_nope_{way}+pretrain_4k", "train.micro_batch=2")
    kept = account(of.config, of.plan).activation_bytes
    assert sum(mixer_bytes(of, layer) for layer in of.plan.layers) == 2 * sum(kept.values())
