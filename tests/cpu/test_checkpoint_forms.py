"""Rolling and permanent checkpoints hold the same state: bit for bit, and so does what is written beside training."""

from pathlib import Path

import pytest
import torch

from hybrid_megatron.checkpoint.store import read_progress
from tests.cpu import checkpoint_cells as cells
from tests.cpu.runs import checkpoints, contents, equal, train
from tests.cpu.test_parity import LAYOUTS, LAYOUTS_MORE
from tests.cpu.tiny import tiny_words

HERE = {"one process": (1, [])} | LAYOUTS | LAYOUTS_MORE
HH = "pattern=[{heads: [{mixer: gdn, share: 3}, {mixer: attention, position: nope}]}]"
HALF_HH = "pattern=[{heads: [{mixer: gdn, share: 1}, {mixer: attention, position: nope, share: 1}]}]"
ONE_GDN = "pattern=[{mixer: attention, position: rope, repeat: 3}, {mixer: gdn}]"
# Of float32 decays beside bfloat16 norms; with one GDN layer of few heads their buffer is so small that a quarter holds padding alone.
MODELS = {
    "LH, bf16": ["train.precision=bf16"],
    "HH, bf16": [HH, "train.precision=bf16", "model.num_kv_heads=4"],
    "half HH, bf16": [HALF_HH, "train.precision=bf16", "model.num_kv_heads=4"],
    "one GDN, bf16": [ONE_GDN, "train.precision=bf16"],
    "odd sizes": ["model.ffn_size=46", "model.vocab_size=259"],
    "rwkv7, bf16": ["pattern=[{mixer: rwkv7}]", "train.precision=bf16"],
}


def words(tiny_data: Path, layout: str, *more: str) -> list[str]:
    return tiny_words(tiny_data, "run_dir=unused", *more, *HERE[layout][1])


def check_equal(one: Path, other: Path) -> None:
    """Parameters, masters, both moments, step counts: everything but random states, which are of a layout."""
    first, second = (
        {key: value for key, value in contents(path).items() if not key.startswith(("rng/", "common_state"))} for path in (one, other)
    )
    assert first.keys() == second.keys()
    assert {key.split(".")[2] for key in first if key.startswith("optimizer.state.")} == {"param", "exp_avg", "exp_avg_sq"}
    assert all(float(value.abs().sum()) > 0 for key, value in first.items() if "exp_avg_sq" in key), "there is something to compare"
    different = [key for key in first if not equal(first[key], second[key])]
    assert not different


MOVES = [
    ("LH, bf16", "data 2", ["data 4"]),
    ("one GDN, bf16", "data 4", ["data 2"]),
    ("half HH, bf16", "tensor 2 + sequence", ["tensor 2 + sequence, data 2"]),
]
MOVES_MORE = [
    ("LH, bf16", "data 2", ["data 2", "one process"]),
    ("HH, bf16", "data 2", ["one process"]),
    ("one GDN, bf16", "one process", ["data 4"]),
    ("one GDN, bf16", "data 4", ["data 4"]),
    ("odd sizes", "one process", ["data 2"]),
    ("LH, bf16", "context 2", ["one process"]),
    ("LH, bf16", "pipeline 2", ["pipeline 2, data 2"]),
    ("rwkv7, bf16", "tensor 2 + sequence", ["tensor 2 + sequence, data 2"]),
    ("LH, bf16", "pipeline 2 x virtual 2", ["pipeline 2 x virtual 2, data 2"]),
]


@pytest.mark.parametrize("model, written, read", [*MOVES, *(pytest.param(*move, marks=pytest.mark.slow) for move in MOVES_MORE)])
def test_rolling_is_permanent_bit_for_bit_on_any_number_of_data_ranks(ranks, tiny_data, tmp_path, model, written, read):
    rolling, permanent = tmp_path / "rolling", tmp_path / "permanent"
    ranks.run(HERE[written][0], cells.save_both_forms, words(tiny_data, written, *MODELS[model]), rolling, permanent)
    assert read_progress(rolling / "checkpoints/step_00000003").form == "rolling"
    assert read_progress(permanent / "checkpoints/step_00000003").form == "permanent"
    for layout in read:
        for source in (rolling, permanent):
            target = tmp_path / f"{layout} from {source.name}"
            ranks.run(HERE[layout][0], cells.load_and_save_permanently, words(tiny_data, layout, *MODELS[model]), source, target)
            check_equal(target / "checkpoints/step_00000003", permanent / "checkpoints/step_00000003")


@pytest.mark.parametrize("model", ["LH, bf16", "one GDN, bf16"])
def test_a_share_without_a_parameter_is_met(ranks, tiny_data, model):
    """Only where it is, the tests above prove anything about it."""
    [empty] = {tuple(each) for each in ranks.run(4, empty_shares, words(tiny_data, "data 4", *MODELS[model]))}
    assert any(empty) == (model == "one GDN, bf16")


def empty_shares(words: list[str]) -> list[bool]:
    """Of all ranks: whether one of its shares of a buffer holds no parameter."""
    with cells._trainer(words) as (_, state, trainer):
        [part] = trainer.optimizer.chained_optimizers
        mine = any(not bucket["param_map"] for ranges in part.gbuf_ranges for buckets in ranges.values() for bucket in buckets)
        return state.of_all_ranks(mine)


@pytest.mark.parametrize(
    "form, size",
    [
        ("rolling", 2),
        ("permanent", 1),
        pytest.param("rolling", 1, marks=pytest.mark.slow),
        pytest.param("permanent", 2, marks=pytest.mark.slow),
    ],
)
def test_what_is_written_beside_training_is_what_was_there(ranks, tiny_data, tmp_path, form, size):
    """Every file but the marker's neighbours: the same bytes, though three steps have changed the state before it was written."""
    folders = {name: tmp_path / name for name in ("at_once", "beside")}
    going = ranks.run(size, cells.save_while_training, words(tiny_data, "one process", "train.precision=bf16"), folders, form)
    assert going == [[True] * 3] * size, "it was under way all the time"
    one, other = (folder / "checkpoints/step_00000002" for folder in folders.values())
    assert sorted(path.name for path in one.iterdir()) == sorted(path.name for path in other.iterdir())
    first, second = contents(one), contents(other)
    assert first.keys() == second.keys() and not [key for key in first if not equal(first[key], second[key])]


def test_data_ranks_share_what_they_hold_alike(ranks, tiny_data, tmp_path):
    """A permanent checkpoint of two data ranks: each writes half of it."""
    ranks.run(2, cells.save_both_forms, words(tiny_data, "data 2"), tmp_path / "rolling", tmp_path / "permanent")
    for form in ("rolling", "permanent"):
        sizes = [path.stat().st_size for path in (tmp_path / form / "checkpoints/step_00000003").glob("*.distcp")]
        assert len(sizes) == 2 and max(sizes) < 1.3 * min(sizes), form


def test_padding_of_a_rolling_checkpoint_is_zero(ranks, tiny_data, tmp_path):
    """And not what happened to lie in memory."""
    ranks.run(2, cells.save_both_forms, words(tiny_data, "data 2", "train.precision=bf16"), tmp_path / "rolling", tmp_path / "permanent")
    held = contents(tmp_path / "rolling/checkpoints/step_00000003")
    moments = [value for key, value in held.items() if key.endswith(".exp_avg_sq") and "torch.float32, torch" in key]
    [decays] = moments
    assert decays.numel() > 64 and int((decays != 0).sum()) <= 2 * 2 * 4, "A_log and dt_bias of two layers of four heads"
    assert torch.isfinite(decays).all()


def check_refused(ranks, words_of, run: Path, layout: str, *sentences: str) -> None:
    ended = train(ranks, HERE[layout][0], words_of(layout))
    assert ended.code == 2
    [said] = ended.errors
    for sentence in sentences:
        assert sentence in said, said


@pytest.mark.slow
def test_rolling_under_another_tensor_or_pipeline_layout(ranks, tiny_data, tmp_path):
    """One sentence with both layouts and the ways out; parameters alone may be taken from it under any."""
    run = tmp_path / "run"

    def of(layout: str, *more: str) -> list[str]:
        return tiny_words(tiny_data, f"run_dir={run}", "train.tokens=3072", *HERE[layout][1], *more)

    assert train(ranks, 1, of("one process"), stop=(2, 0, "SIGTERM")).code == 143
    both = "written under tensor 1, pipeline 1, virtual_pipeline 1, and this run has "
    stop = "resume under the old layout and stop with Ctrl-C (SIGINT), which saves a permanent one"
    check_refused(
        ranks, of, run, "tensor 2", both + "tensor 2, pipeline 1, virtual_pipeline 1", "step_00000002: a rolling checkpoint", stop
    )
    assert checkpoints(run) == ["step_00000002"]

    begun = tmp_path / "begun"
    ended = train(ranks, 2, tiny_words(tiny_data, f"run_dir={begun}", "train.tokens=2048", f"init_from={run}", "parallel.tensor=2"))
    assert ended.code == 0 and "step_00000002 (1,024 tokens), its parameters alone" in ended.out

    assert train(ranks, 1, of("one process"), stop=(4, 0, "SIGINT")).code == 130
    assert train(ranks, 1, of("one process", "checkpoint.interval_steps=5"), stop=(5, 0, "SIGTERM")).code == 143
    newest = "move those after step_00000004, the newest permanent one, away to resume from it"
    check_refused(ranks, of, run, "tensor 2", "step_00000005: a rolling checkpoint", newest)
    (run / "checkpoints/step_00000005").rename(tmp_path / "away")
    ended = train(ranks, 2, of("tensor 2"))
    assert ended.code == 0 and "resumed    step_00000004" in ended.out
