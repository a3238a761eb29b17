"""Gradients that are reduced bucket by bucket during the backward pass are those reduced after it; nothing else depends on the buckets."""

import math
from pathlib import Path

import pytest
import torch

from hybrid_megatron.config.megatron import ddp_config
from hybrid_megatron.training.buckets import bucketed_layout
from tests.cpu import checkpoint_cells, stability_cells
from tests.cpu.bucket_cells import SMALL, reductions, with_buckets
from tests.cpu.runs import computed, contents, differing
from tests.cpu.test_checkpoint_forms import HERE, MODELS, check_equal, words
from tests.cpu.test_longce import WIDE, longce
from tests.cpu.tiny import tiny_words
from tests.cpu.zoo import MATRIX, MIXED

SIZES = [(32, 46), (259, 32), (32,), (5,), (2, 64), (96, 32), (32,), (1,), (64, 64), (7, 3)]


def chunk(dtypes: list[torch.dtype]) -> torch.nn.ParameterList:
    return torch.nn.ParameterList([torch.zeros(size, dtype=dtypes[n % len(dtypes)]) for n, size in enumerate(SIZES * 4)])


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.bfloat16] * 3 + [torch.float32]])
@pytest.mark.parametrize("ranks", [2, 3, 8, 256])
def test_buckets_move_nothing(ranks, dtypes):
    ddp = ddp_config(ranks)
    assert ddp.overlap_grad_reduce and ddp.bucket_size == max(40_000_000, 1_000_000 * ranks)
    parameters = chunk(dtypes)
    whole = bucketed_layout(parameters, ranks, ddp).layouts
    ddp.bucket_size = SMALL
    cut = bucketed_layout(parameters, ranks, ddp).layouts
    assert cut.keys() == whole.keys() and len(cut) == len(set(dtypes))
    assert any(len(layout.bucket_indices) > 3 for layout in cut.values())
    for key, layout in cut.items():
        [(_, end)], [unpadded] = whole[key].bucket_indices, whole[key].per_bucket_numel_unpadded
        begins, ends = zip(*layout.bucket_indices)
        assert begins == (0, *ends[:-1]) and ends[-1] == end and all(border % ranks == 0 for border in ends)
        assert all(stop - start >= SMALL for start, stop in layout.bucket_indices[:-1])
        assert layout.per_bucket_numel_unpadded == [stop - start for start, stop in zip(begins, (*ends[:-1], unpadded))]
        assert [*layout.param_index_map] == [*whole[key].param_index_map]
        for parameter, (start, stop, bucket) in layout.param_index_map.items():
            assert (start, stop, 0) == whole[key].param_index_map[parameter]
            assert begins[bucket] <= start and stop <= ends[bucket]


def test_one_rank_has_nothing_to_reduce():
    ddp = ddp_config(1)
    assert not ddp.overlap_grad_reduce
    layouts = bucketed_layout(chunk([torch.float32]), 1, ddp).layouts
    assert all(len(layout.bucket_indices) == 1 for layout in layouts.values())


# Models in whose graphs ranks could differ: of every mixer, and documents that end at other places on each rank.
ORDERS = [
    ("context 2, data 2", MIXED["all options, HH"], ["data.document_mask=true"]),
    ("pipeline 2 x virtual 2, data 2", MIXED["all mixers, LH"], []),
]
ORDERS_MORE = [
    ("tensor 2 + sequence, data 2", MIXED["all mixers, HH"], ["train.recompute=full"]),
    ("context 2", MIXED["all mixers, HH"], []),
    *(("context 2", model, ["data.document_mask=true"]) for model in MATRIX.values()),
    *(("context 4", model, ["train.recompute=selective"]) for model in MIXED.values()),
]


@pytest.mark.parametrize("layout, model, more", [*ORDERS, *(pytest.param(*each, marks=pytest.mark.slow) for each in ORDERS_MORE)])
def test_ranks_reduce_in_one_order(ranks, tiny_data, layout, model, more):
    """All of them before the backward pass is over. A rank with another order would add up what does not belong together."""
    size, overrides = HERE[layout]
    given = tiny_words(tiny_data, "run_dir=unused", "train.precision=bf16", *overrides, *model, *more)
    orders = {}
    for place, *order in ranks.run(size, reductions, given):
        assert order == orders.setdefault(place, order)
        assert all(len(buckets) > 2 for buckets in order[1])


SAME = [
    ("data 2", "LH, bf16", []),
    ("context 2", "odd sizes", []),
]
SAME_MORE = [
    ("pipeline 2 x virtual 2, data 2", "LH, bf16", [*longce(), *WIDE]),
    ("tensor 2 + sequence, data 2", "half HH, bf16", ["train.recompute=full"]),
    ("data 2", "odd sizes", longce()),
    ("data 2", "rwkv7, bf16", ["train.recompute=selective"]),
    ("data 2", "one GDN, bf16", ["train.micro_batch=4"]),
    ("pipeline 2, data 2", "HH, bf16", []),
    ("context 2, pipeline 2", "LH, bf16", [*longce(), *WIDE]),
]


@pytest.mark.parametrize("layout, model, more", [*SAME, *(pytest.param(*each, marks=pytest.mark.slow) for each in SAME_MORE)])
def test_training_and_checkpoints_are_those_of_one_bucket(ranks, tiny_data, tmp_path, layout, model, more):
    """Bit for bit, where two ranks' gradients are added and the norm, added up in other parts, does not clip them."""
    size, _ = HERE[layout]
    given = words(tiny_data, layout, *MODELS[model], *more, "optimizer.clip_grad=1e6")
    for name, elements in {"one": None, "many": SMALL}.items():
        folders = (tmp_path / name / form for form in ("rolling", "permanent"))
        ranks.run(size, with_buckets, elements, checkpoint_cells.save_both_forms, given, *folders)
    for form in ("rolling", "permanent"):
        one, many = (contents(tmp_path / name / form / "checkpoints/step_00000003") for name in ("one", "many"))
        assert not differing(one, many)


MOVES = [
    ("LH, bf16", "data 2", ["data 4", "one process"]),
]
MOVES_MORE = [
    ("odd sizes", "one process", ["data 2", "context 2, data 2"]),
    ("one GDN, bf16", "data 4", ["data 2", "one process"]),
    ("rwkv7, bf16", "data 2", ["data 4"]),
    ("half HH, bf16", "tensor 2 + sequence, data 2", ["tensor 2 + sequence"]),
    ("LH, bf16", "pipeline 2 x virtual 2, data 2", ["pipeline 2 x virtual 2"]),
]


@pytest.mark.parametrize("model, written, read", [*MOVES, *(pytest.param(*move, marks=pytest.mark.slow) for move in MOVES_MORE)])
def test_checkpoints_move_between_buckets(ranks, tiny_data, tmp_path, model, written, read):
    """Of one size where they are written, of another where they are read."""
    rolling, permanent = tmp_path / "rolling", tmp_path / "permanent"
    given = words(tiny_data, written, *MODELS[model])
    ranks.run(HERE[written][0], with_buckets, SMALL, checkpoint_cells.save_both_forms, given, rolling, permanent)
    for layout in read:
        for source in (rolling, permanent):
            target = tmp_path / f"{layout} from {source.name}"
            given = words(tiny_data, layout, *MODELS[model])
            ranks.run(HERE[layout][0], with_buckets, 3 * SMALL, checkpoint_cells.load_and_save_permanently, given, source, target)
            check_equal(target / "checkpoints/step_00000003", permanent / "checkpoints/step_00000003")


def test_a_skipped_update_leaves_nothing_behind(ranks, tiny_data, tmp_path):
    """Losses, norms and steps after one whose gradients were not finite."""

    def trained(name: str, elements: int | None) -> str:
        run: Path = tmp_path / name
        given = tiny_words(tiny_data, f"run_dir={run}", "train.tokens=4096", "stability.non_finite=skip", "optimizer.clip_grad=1e6")
        ended = ranks.run(2, with_buckets, elements, stability_cells._disturbed, given, {3: math.inf, 4: math.inf, 6: math.inf}, {}, {})
        assert {each.code for each in ended} == {0}, ended
        lines = computed(run)
        assert [line["step"] for line in lines if "skipped" in line] == [3, 4, 6]
        return repr([{key: value for key, value in line.items() if key != "grad_norm"} for line in lines])

    assert trained("one", None) == trained("many", SMALL)
