"""What the accounts say travels between context ranks is what travels."""

import pytest

from hybrid_megatron.model.accounting import account
from hybrid_megatron.model.pattern import plan_layers
from tests.cpu import op_cells, traffic
from tests.cpu.test_zoo_parity import ALL_TO_ALL
from tests.cpu.tiny import tiny_config, tiny_words
from tests.cpu.zoo import MATRIX, MIXED

WAYS = {"states and halos": [], "all-to-all": ALL_TO_ALL}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("model", MIXED)
def test_accounts_of_context_parallelism(ranks, tiny_data, model, size, way):
    overrides = ["run_dir=unused", f"parallel.context={size}", *MIXED[model], *WAYS[way]]
    if size == 4 and way == "all-to-all" and model != "all mixers, LH":
        return  # two heads of a mixer do not divide by four ranks, and validation says so
    config = tiny_config(tiny_data, *overrides)
    accounts, samples = account(config, plan_layers(config)), config.train.micro_batch
    forward, backward = zip(*ranks.run(size, traffic.received, tiny_words(tiny_data, *overrides)))
    assert max(forward) == samples * sum(accounts.context_bytes.values())
    most = samples * sum(accounts.context_backward_bytes.values())
    # Gradients of halos go to the ranks whose tokens they are; on four the busiest of those has fewer than the busiest that received.
    assert 0.95 * most <= max(backward) <= most and (size == 4 or max(backward) == most)


@pytest.mark.parametrize("mixer", ["gla", "gdn", "kda", "lightning", "mamba2", "rwkv7"])
def test_states_are_as_many_bytes_at_any_length(tiny_data, mixer):
    """All-to-all grows with the context, states do not; at 4 x 64 tokens of 8 heads of 8 channels the states are smaller."""

    def sent(context: int, *more: str) -> int:
        words = ["run_dir=unused", "parallel.context=2", f"train.context={context}", *MATRIX[f"{mixer}, LH"], *more]
        config = tiny_config(tiny_data, *words)
        return account(config, plan_layers(config)).context_bytes[mixer]

    shift = 3 * 32 * 4 if mixer == "rwkv7" else 0  # the token before a chunk, in three layers
    assert sent(256) == sent(64)
    assert sent(256, *ALL_TO_ALL) - shift == 4 * (sent(64, *ALL_TO_ALL) - shift) > sent(256)


def test_nothing_travels_on_one_context_rank(tiny_data):
    config = tiny_config(tiny_data, "run_dir=unused", *MIXED["all options, HH"])
    assert set(account(config, plan_layers(config)).context_bytes.values()) == {0}


@pytest.mark.parametrize("size, way", [(2, "gather"), (4, "gather"), (2, "all_to_all")])
@pytest.mark.parametrize("position", ["nope", "rope"])
def test_what_attention_keeps_is_what_the_plan_says(ranks, position, size, way):
    """On every rank, in float32. Each head has its own keys, and there are no gates and norms: of these a CPU keeps more than CUDA."""
    words = [
        "776m+rope+pretrain_4k", "data.train=unused", "train.precision=fp32", "train.context=512", "train.micro_batch=2",
        "model={num_layers: 1, hidden_size: 64, num_heads: 8, head_dim: 16, ffn_size: 64, vocab_size: 64}",
        f"pattern=[{{mixer: attention, position: {position}}}]",
        f"parallel.context={size}", f"parallel.context_attention={way}",
    ]  # fmt: skip
    for found, planned in ranks.run(size, op_cells.kept_over_ranks, words):
        assert found == pytest.approx(planned, rel=0.01)
