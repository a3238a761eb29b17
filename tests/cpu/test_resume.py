"""A run that stopped and went on is the run that never stopped: bitwise under one layout, to 1e-5 across layouts.

Twenty steps of eight samples over a dataset of some thirty, so that every part of a run crosses the borders of epochs.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest

from hybrid_megatron.checkpoint.store import read_progress
from hybrid_megatron.data import BatchStream, open_dataset
from tests.cpu.runs import checkpoints, computed, contents, equal, snapshot, tensors, train, train_and_watch
from tests.cpu.test_outcome import crashed_in_a_step
from tests.cpu.test_parity import LAYOUTS
from tests.cpu.tiny import tiny_config, tiny_words
from tests.cpu.zoo import MATRIX, MIXED

FORMS = {"SIGTERM": "rolling", "SIGINT": "permanent"}
ONE = {"one process": (1, [])}
HERE = ONE | LAYOUTS
SAME = ["one process", "data 2"]
SAME_MORE = [
    "tensor 2 + sequence",
    "context 2",
    "pipeline 2",
    "pipeline 2 x virtual 2",
    "tensor 2 + sequence, data 2",
    "pipeline 2, data 2",
    "context 2, pipeline 2",
]
MOVES = [
    ("tensor 2", "data 2"),
    ("pipeline 2", "tensor 2"),
    ("data 2", "one process"),
    ("one process", "pipeline 2 x virtual 2"),
]
MOVES_MORE = [
    ("one process", "pipeline 2"),
    ("pipeline 2 x virtual 2", "one process"),
    ("one process", "tensor 2"),
    ("data 4", "data 2"),
    ("data 2", "data 4"),
    ("tensor 2", "one process"),
    ("tensor 2", "tensor 2 + sequence, data 2"),
    ("context 2", "one process"),
    ("tensor 2 + sequence, context 2", "pipeline 2, data 2"),
    ("pipeline 2, data 2", "tensor 2 + sequence, data 2"),
    ("data 2", "context 2"),
    ("pipeline 2", "pipeline 2 x virtual 2"),
]


def words(tiny_data: Path, run_dir: Path, layout: str, *more: str) -> list[str]:
    """Train on the small dataset, with checkpoints where the run stops or ends and nowhere else."""
    return tiny_words(
        tiny_data, f"run_dir={run_dir}", f"data.train={tiny_data / 'valid'}", "checkpoint.interval_steps=1000", *HERE[layout][1], *more
    )


def straight(ranks, tiny_data: Path, run_dir: Path, layout: str, *more: str) -> Path:
    assert train(ranks, HERE[layout][0], words(tiny_data, run_dir, layout, *more)).code == 0
    return run_dir


FIXED = ("tensor", "pipeline", "virtual_pipeline")
"""Sizes that a rolling checkpoint keeps."""


def signal_before(first: str, second: str) -> tuple[str, int]:
    """(signal, exit code) that saves what `second` can resume from: SIGTERM a rolling checkpoint, Ctrl-C a permanent one."""
    sizes = [
        [word for word in HERE[layout][1] if word.startswith(tuple(f"parallel.{name}=" for name in FIXED))] for layout in (first, second)
    ]
    return ("SIGTERM", 143) if sizes[0] == sizes[1] else ("SIGINT", 130)


def in_two_parts(ranks, tiny_data: Path, run_dir: Path, first: str, second: str, *more: str, sent: str | None = None) -> Path:
    name, code = (sent, {"SIGTERM": 143, "SIGINT": 130}[sent]) if sent else signal_before(first, second)
    ended = train(ranks, HERE[first][0], words(tiny_data, run_dir, first, *more), stop=(10, 0, name))
    assert ended.code == code and read_progress(run_dir / "checkpoints/step_00000010").form == FORMS[name]
    assert checkpoints(run_dir) == ["step_00000010"] and len(computed(run_dir)) == 10
    ended = train(ranks, HERE[second][0], words(tiny_data, run_dir, second, *more))
    assert ended.code == 0 and "resumed    step_00000010 (5,120 tokens)" in ended.out and not ended.err
    return run_dir


def test_the_dataset_is_smaller_than_the_run(tiny_data):
    config = tiny_config(tiny_data, "run_dir=unused", f"data.train={tiny_data / 'valid'}")
    samples = len(open_dataset(config, "train"))
    assert 2 * samples < 10 * config.batch_samples, "each half of the run crosses the border of an epoch"
    assert samples % config.batch_samples, "and a step lies across one"


def test_every_epoch_has_every_sample_once_in_an_order_of_its_own(tiny_data):
    config = tiny_config(tiny_data, "run_dir=unused", f"data.train={tiny_data / 'valid'}")
    data = open_dataset(config, "train")

    def rank(index: int) -> SimpleNamespace:
        return SimpleNamespace(data=2, data_rank=index, context=1, context_rank=0)

    streams = [BatchStream(data, rank(index), plan=config.batch_plan, micro_batch=2, seed=config.seed) for index in range(2)]
    seen = [row.numpy().tobytes() for step in range(len(data)) for stream in streams for batch in stream.step(step) for row in batch.tokens]
    epochs = [seen[at : at + len(data)] for at in range(0, len(seen), len(data))]
    assert len(epochs) == 8 and len(set(epochs[0])) == len(data)
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 8


@pytest.fixture(scope="module")
def one_process(ranks, tiny_data, tmp_path_factory) -> Path:
    return straight(ranks, tiny_data, tmp_path_factory.mktemp("straight") / "run", "one process")


def check_bitwise(a: Path, b: Path) -> None:
    assert computed(a) == computed(b)
    assert len(computed(a)) == 20
    final, other = (contents(run / "checkpoints/step_00000020") for run in (a, b))
    assert final.keys() == other.keys()
    assert any("exp_avg_sq" in key for key in final), "the optimizer's state is there"
    different = [key for key in final if not equal(final[key], other[key])]
    assert not different


@pytest.mark.parametrize("layout", SAME)
def test_resume_under_the_same_layout_is_bitwise(ranks, tiny_data, tmp_path, layout, one_process):
    whole = one_process if layout == "one process" else straight(ranks, tiny_data, tmp_path / "whole", layout)
    for sent in FORMS:
        check_bitwise(whole, in_two_parts(ranks, tiny_data, tmp_path / sent, layout, layout, sent=sent))


def test_resume_in_bf16_is_bitwise(ranks, tiny_data, tmp_path):
    """Parameters are bfloat16 and their float32 masters live in the optimizer."""
    bf16 = "train.precision=bf16"
    whole = straight(ranks, tiny_data, tmp_path / "whole", "one process", bf16)
    check_bitwise(whole, in_two_parts(ranks, tiny_data, tmp_path / "parts", "one process", "one process", bf16))


@pytest.mark.slow
@pytest.mark.parametrize("layout", SAME_MORE)
def test_resume_under_a_further_layout_is_bitwise(ranks, tiny_data, tmp_path, layout):
    whole = straight(ranks, tiny_data, tmp_path / "whole", layout)
    check_bitwise(whole, in_two_parts(ranks, tiny_data, tmp_path / "parts", layout, layout))


def check_move(ranks, tiny_data: Path, run_dir: Path, one_process: Path, first: str, second: str, *more: str) -> None:
    moved = in_two_parts(ranks, tiny_data, run_dir, first, second, *more)
    for mine, theirs in zip(computed(moved), computed(one_process), strict=True):
        assert mine["lr"] == theirs["lr"] and mine["tokens"] == theirs["tokens"]
        assert abs(mine["loss"] - theirs["loss"]) <= 1e-5, mine["step"]
        assert abs(mine["grad_norm"] - theirs["grad_norm"]) <= 1e-4 * theirs["grad_norm"], mine["step"]
    assert abs(computed(moved)[-1]["validation_loss"] - computed(one_process)[-1]["validation_loss"]) <= 1e-5
    final, expected = (tensors(run / "checkpoints/step_00000020") for run in (moved, one_process))
    assert final.keys() == expected.keys()
    errors = {key: float((final[key] - expected[key]).norm() / expected[key].norm()) for key in expected}
    worst = max(errors, key=errors.get)
    assert errors[worst] <= 1e-4, f"{worst}: {errors[worst]:.2e}"


@pytest.mark.parametrize("first, second", MOVES)
def test_resume_under_another_layout(ranks, tiny_data, tmp_path, one_process, first, second):
    check_move(ranks, tiny_data, tmp_path / "run", one_process, first, second)


@pytest.mark.slow
@pytest.mark.parametrize("first, second", MOVES_MORE)
def test_resume_under_a_further_layout(ranks, tiny_data, tmp_path, one_process, first, second):
    check_move(ranks, tiny_data, tmp_path / "run", one_process, first, second)


CALM = ["optimizer.peak_lr=1e-3", "schedule.warmup_tokens=9_000"]
"""A slow warm-up: Adam's first updates are as large as the learning rate, whatever the gradient, and so is what rounding makes of them."""
ZOO = {model: [*(MIXED | MATRIX)[model], *CALM] for model in ("all options, HH", "gla, LH")}
ZOO_MOVES = [("tensor 2", "one process")]
ZOO_MOVES_MORE = [
    ("pipeline 2", "one process"),
    ("data 2", "one process"),
    ("one process", "tensor 2 + sequence"),
    ("context 2", "tensor 2"),
    ("pipeline 2 x virtual 2", "data 2"),
]


@pytest.fixture(scope="module")
def one_process_of(ranks, tiny_data, tmp_path_factory):
    """Model of all mixers -> its run on one process, computed once."""
    runs: dict[str, Path] = {}

    def of(model: str) -> Path:
        if model not in runs:
            runs[model] = straight(ranks, tiny_data, tmp_path_factory.mktemp("zoo") / "run", "one process", *ZOO[model])
        return runs[model]

    return of


def test_resume_of_all_mixers_is_bitwise(ranks, tiny_data, tmp_path, one_process_of):
    model = "all options, HH"
    parts = in_two_parts(ranks, tiny_data, tmp_path / "parts", "one process", "one process", *ZOO[model])
    check_bitwise(one_process_of(model), parts)


@pytest.mark.parametrize("first, second", ZOO_MOVES)
def test_all_mixers_move_between_layouts(ranks, tiny_data, tmp_path, one_process_of, first, second):
    model = "all options, HH"
    check_move(ranks, tiny_data, tmp_path / "run", one_process_of(model), first, second, *ZOO[model])


@pytest.mark.slow
@pytest.mark.parametrize("first, second", ZOO_MOVES_MORE)
@pytest.mark.parametrize("model", ZOO)
def test_models_of_all_mixers_move_further(ranks, tiny_data, tmp_path, one_process_of, model, first, second):
    check_move(ranks, tiny_data, tmp_path / "run", one_process_of(model), first, second, *ZOO[model])


# Six steps of four samples, then seven of eight, over a dataset of some thirty.
GROWS = ["schedule.start_batch_tokens=256", "schedule.batch_warmup_tokens=1536", "train.tokens=5120"]


@pytest.fixture(scope="module")
def growing(ranks, tiny_data, tmp_path_factory) -> tuple[Path, dict[int, list[bytes]]]:
    """A run on one process that does not stop, and the samples of its steps."""
    run = tmp_path_factory.mktemp("growing") / "run"
    ended, seen = train_and_watch(ranks, 1, words(tiny_data, run, "one process", *GROWS))
    assert ended.code == 0 and [len(seen[step]) for step in range(13)] == [4] * 6 + [8] * 7
    return run, seen


@pytest.mark.parametrize(
    "first, second, stop",
    [
        ("one process", "one process", 4),
        ("data 2", "one process", 4),
        ("one process", "data 2", 7),
        ("data 2", "pipeline 2 x virtual 2", 4),
    ],
)
def test_resume_of_a_growing_batch(ranks, tiny_data, tmp_path, growing, first, second, stop):
    """The same samples in the same steps, stopped while it grows or after; the schedule of stages takes fewer micro-batches at first."""
    whole, expected = growing
    run = tmp_path / "run"
    name, code = signal_before(first, second)
    ended, before = train_and_watch(ranks, HERE[first][0], words(tiny_data, run, first, *GROWS), stop=(stop, 0, name))
    assert ended.code == code and checkpoints(run) == [f"step_{stop:08d}"]
    ended, after = train_and_watch(ranks, HERE[second][0], words(tiny_data, run, second, *GROWS))
    assert ended.code == 0 and f"resumed    step_{stop:08d} ({256 * min(stop, 6) + 512 * max(0, stop - 6):,} tokens)" in ended.out
    if "pipeline" not in second:  # whose two stages both read
        assert list(before) == list(range(stop)) and before | after == expected
    final, straight_on = (tensors(path / "checkpoints/step_00000013") for path in (run, whole))
    if first == second:
        assert computed(run) == computed(whole) and equal(final, straight_on)
    for mine, theirs in zip(computed(run), computed(whole), strict=True):
        assert mine["lr"] == theirs["lr"] and mine["tokens"] == theirs["tokens"]
        assert abs(mine["loss"] - theirs["loss"]) <= 1e-5, mine["step"]
    for key, expected_value in straight_on.items():
        assert float((final[key] - expected_value).norm()) <= 1e-4 * float(expected_value.norm()), key


def test_a_layout_that_the_first_batch_does_not_fit_is_refused(ranks, tiny_data, tmp_path, growing):
    """Four samples of the first steps, on four data ranks of two each; with a smaller micro-batch they may."""
    run, _ = growing
    ended = train(ranks, 4, words(tiny_data, run, "data 4", *GROWS))
    assert ended.code == 2 and ended.errors[0].startswith("schedule.start_batch_tokens=256: the batch grows in steps of it")
    assert ended.errors[0].endswith("= 64 * 2 * 4; none is; lower train.micro_batch or the data-parallel ranks")
    assert train(ranks, 4, words(tiny_data, run, "data 4", *GROWS, "train.micro_batch=1")).code == 0


def test_a_folder_without_checkpoints_is_still_one_runs_own(ranks, tiny_data, tmp_path):
    """Crashed before its first checkpoint, the same recipe begins anew with one command; another one would write over what is there."""
    run = tmp_path / "run"
    same = words(tiny_data, run, "one process", "train.tokens=2048")
    ranks.run(1, crashed_in_a_step, same, tmp_path / "outcome")
    before = snapshot(run)
    another = train(ranks, 1, [*same, "optimizer.peak_lr=0.5", "seed=7", "parallel.tensor=1"])
    assert another.code == 2 and another.errors == [
        f"run_dir={run}: it holds a run of another recipe that has no checkpoint yet (optimizer.peak_lr 0.003 there and 0.5 here, seed "
        "1234 there and 7 here); give another run_dir=PATH, or remove this folder"
    ]
    assert snapshot(run) == before
    many = train(ranks, 1, [*same, "optimizer.peak_lr=0.5", "seed=7", "train.context=32", "train.tokens=4096", "optimizer.beta1=0.5"])
    assert many.code == 2 and ", and 2 settings more); give another" in many.errors[0], many
    assert train(ranks, 1, same).code == 0 and len(computed(run)) == 4
    assert (run / "RUN_ID").read_bytes() == before["RUN_ID"][1]


def test_metrics_of_nobody_knows_what_are_not_written_over(ranks, tiny_data, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    ended = train(ranks, 1, words(tiny_data, tmp_path, "one process"))
    assert ended.code == 2 and ended.errors[0].startswith(f"{tmp_path}/config.yaml: missing, though the folder has metrics.jsonl")
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
