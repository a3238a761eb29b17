"""What a user can get wrong: each is one clear sentence, exit code 2, no traceback, and nothing in the run folder changes."""

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from hybrid_megatron.command_line import interpreter
from hybrid_megatron.config import load_recipe
from hybrid_megatron.data import build_index_caches
from hybrid_megatron.training.run_folder import RunFolder
from tests.cpu.quick import quick_and_slow
from tests.cpu.runs import CHECKOUT, Process, checkpoints, computed, snapshot, tensors, train
from tests.cpu.tiny import tiny_words
from tests.cpu.token_files import run as data_prep


@pytest.fixture(scope="module")
def finished_half(ranks, tiny_data, tmp_path_factory) -> tuple[Path, list[str]]:
    """A run of twelve steps stopped after step 8, with checkpoints after steps 5 and 8, and its words without `run_dir`."""
    run = tmp_path_factory.mktemp("half") / "run"
    words = tiny_words(tiny_data, "checkpoint.interval_steps=5", "train.tokens=6144")
    assert train(ranks, 1, [*words, f"run_dir={run}"], stop=(8, 0, "SIGTERM")).code == 143
    assert checkpoints(run) == ["step_00000005", "step_00000008"]
    return run, words


@pytest.fixture
def half_run(finished_half, tmp_path) -> tuple[Path, list[str]]:
    """A copy of that run, to be damaged."""
    run, words = finished_half
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run", [*words, f"run_dir={tmp_path / 'run'}"]


@pytest.fixture
def data(tiny_data, tmp_path) -> Path:
    """A copy of the tiny data, to be damaged."""
    shutil.copytree(tiny_data, tmp_path / "data")
    return tmp_path / "data"


def refused(ranks, words: list[str], size: int = 1) -> str:
    ended = train(ranks, size, words)
    assert ended.code == 2
    [said] = ended.errors
    return said


def test_recipe_errors_of_the_command_itself():
    """A typed command, a real process: nothing before or behind the two sentences."""
    ended = Process(["776m+gdn_nope_lh+pretrain_4k", "model.num_layer=3", "train.context='4096'"]).end()
    assert ended.code == 2 and ended.out == ""
    assert ended.errors == [
        "override model.num_layer=3: model.num_layer is not a setting; did you mean model.num_layers?",
        "override train.context='4096': train.context='4096': this must be a whole number, written without quotes",
    ]


def test_broken_rules_are_said_by_rank_0_alone_and_all_at_once(ranks, tiny_data, tmp_path):
    run = tmp_path / "run"
    ended = train(ranks, 2, tiny_words(tiny_data, f"run_dir={run}", "parallel.tensor=3", "optimizer.beta2=0.9", "schedule.min_lr=1"))
    assert ended.code == 2
    assert [line.split(":")[0] for line in ended.errors] == ["parallel.tensor=3"] * 2 + ["schedule.min_lr=1.0", "parallel"]
    assert not run.exists()


DATASETS = {
    "missing": (lambda d: (d / "train.bin").unlink(), "train.bin does not exist; make the dataset with python -m data_prep tokenize"),
    "no index": (lambda d: (d / "train.idx").unlink(), "train.idx does not exist"),
    "truncated": (lambda d: truncate(d / "train.bin", 2), "the file is truncated or belongs to another index"),
    "truncated index": (lambda d: truncate(d / "train.idx", 100), "train.idx is damaged"),
    "empty index": (lambda d: (d / "train.idx").write_bytes(b""), "train.idx is damaged"),
    "another index": (lambda d: shutil.copy(d / "valid.idx", d / "train.idx"), "belongs to another index"),
    "header": (lambda d: flip(d / "train.idx", 3), "train.idx is damaged"),
    "lengths": (lambda d: swap_lengths(d / "train.idx"), "train.idx is damaged (its lengths and positions contradict each other)"),
    "manifest is no JSON": (lambda d: truncate(d / "train.manifest.json", 20), "train.manifest.json is damaged"),
    "manifest of another": (lambda d: shutil.copy(d / "valid.manifest.json", d / "train.manifest.json"), "but its manifest says"),
    "manifest of the future": (lambda d: edit_json(d / "train.manifest.json", format=2), "format 2, but format 1 is needed"),
    "no index maps": (lambda d: shutil.rmtree(d / "cache"), f"make them once with: {interpreter()} -m data_prep build-cache /"),
    "truncated index map": (
        lambda d: [truncate(path, 8) for path in (d / "cache").glob("*sample_index.npy")],
        "is damaged (mmap length is greater than file size); remove it and run build-cache again",
    ),
}


def truncate(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def swap_lengths(path: Path) -> None:
    """Two documents exchange their lengths: all sums stay right."""
    content = bytearray(path.read_bytes())
    lengths = np.frombuffer(content, np.int32, 300, offset=34)
    other = next(i for i in range(1, 300) if lengths[i] != lengths[0])
    lengths.flags.writeable = True
    lengths[0], lengths[other] = lengths[other], lengths[0]
    path.write_bytes(content)


def edit_json(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("case", DATASETS)
def test_damaged_dataset(ranks, data, tmp_path, case):
    damage, sentence = DATASETS[case]
    damage(data)
    said = refused(ranks, tiny_words(data, f"run_dir={tmp_path / 'run'}"))
    assert said.startswith("data.train=") or str(data) in said
    assert sentence in said
    assert not (tmp_path / "run").exists()


def test_dataset_without_a_manifest_is_a_warning(ranks, data, tmp_path):
    """Made by other tools it can be trained on, and what cannot be checked is said once."""
    (data / "valid.manifest.json").unlink()
    words = tiny_words(data, f"run_dir={tmp_path / 'run'}", "train.tokens=1536")
    ranks.run(1, build_index_caches_of, words)
    ended = train(ranks, 2, words)
    assert ended.code == 0
    [said] = ended.err.splitlines()
    assert said.startswith("warning: data.valid=") and "there is no valid.manifest.json beside it" in said


def build_index_caches_of(words: list[str]) -> None:
    build_index_caches(load_recipe(words))


def test_context_that_the_dataset_cannot_fill(ranks, tiny_data, tmp_path):
    """Said at once, and not that index maps are missing, which nobody could make."""
    words = ["train.context=32768", "train.batch_tokens=32768", "train.micro_batch=1", "train.tokens=65536"]
    said = refused(ranks, tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}", *words))
    assert said.startswith(f"data.train={tiny_data / 'train'}: it holds ")
    assert said.endswith("fewer than the 32,769 of one sample of train.context=32768; lower train.context or add documents")


def test_budget_beyond_data_that_may_not_repeat(ranks, tiny_data, tmp_path):
    """Refused with what is possible; that fits, and one token more does not, since the last step is a whole one."""
    run = tmp_path / "run"
    data = tiny_data / "valid"
    words = tiny_words(tiny_data, f"run_dir={run}", f"data.train={data}", "data.repeat=false")
    samples = (np.memmap(f"{data}.bin", np.uint16).size - 1) // 64
    fits = samples // 8 * 512
    assert 1024 < fits < 10_240 and samples % 8

    def sentence(steps: int, budget: int) -> str:
        return (
            f"data.repeat=false: the {steps} steps of train.tokens={budget} take {512 * steps:,} tokens, and data.train={data} holds "
            f"{64 * samples:,} in {samples} samples of train.context=64; set train.tokens to {fits} or less, add documents, or set "
            "data.repeat=true"
        )

    assert refused(ranks, words) == sentence(20, 10_240)
    assert refused(ranks, [*words, f"train.tokens={fits + 1}"]) == sentence(fits // 512 + 1, fits + 1)
    said = refused(ranks, [*words, "train.batch_tokens=4096"], size=2)
    assert said.endswith("; lower train.batch_tokens=4096, add documents, or set data.repeat=true")
    grows = ["schedule.start_batch_tokens=256", "schedule.batch_warmup_tokens=512"]  # of 256, 256, then 512
    assert f"set train.tokens to {(64 * samples - 512) // 512 * 512 + 512} or less" in refused(ranks, [*words, *grows])
    assert not run.exists()
    assert train(ranks, 1, [*words, f"train.tokens={fits}"]).code == 0
    assert train(ranks, 1, [*words, f"train.tokens={fits}", "data.repeat=true"]).code == 0, "the same run"


def test_dataset_of_another_tokenizer(ranks, tiny_data, tmp_path):
    said = refused(ranks, tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}", "data.tokenizer=llama3"))
    assert "it was made with the tokenizer tiny (sha256:000000000000...), not with data.tokenizer=llama3" in said


def test_tokenizer_that_does_not_exist(ranks, tiny_data, tmp_path):
    said = refused(ranks, tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}", f"data.tokenizer={tmp_path / 'nope'}"))
    assert said.startswith(f"data.tokenizer={tmp_path / 'nope'} does not exist")


def test_the_command_that_makes_index_maps_is_the_recipes_own(ranks, data, tmp_path):
    shutil.rmtree(data / "cache")
    words = tiny_words(data, f"run_dir={tmp_path / 'a run'}")
    command = refused(ranks, words).partition("python -m data_prep ")[2]
    assert shlex.split(command) == ["build-cache", *words]


@pytest.mark.parametrize("override", ["train.context=0", "seed=-1", "parallel.tensor=3"])
def test_build_cache_checks_the_recipe(tiny_data, override):
    code, said = data_prep("build-cache", *tiny_words(tiny_data, override))
    assert code == 2 and all(line.startswith(f"error: {override}: ") for line in said.err.splitlines())


def test_vocabulary_larger_than_the_models(ranks, tiny_data, tmp_path):
    said = refused(ranks, tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}", "model.vocab_size=128"))
    assert "its tokenizer tiny has 256 words, more than model.vocab_size=128; set model.vocab_size to at least that" in said


def test_world_size_that_the_layout_does_not_divide(ranks, tiny_data, tmp_path):
    said = refused(ranks, tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}", "parallel.context=2"), size=3)
    assert "tensor * context * pipeline = 1 * 2 * 1 = 2 must divide the 3 processes of this run" in said


CHECKPOINTS = {
    "bit flip": (lambda c: flip(c / "__0_0.distcp", 500_000), "__0_0.distcp: damaged, its contents are not those that were written"),
    "truncated": (lambda c: truncate(c / "__0_0.distcp", 1), "__0_0.distcp: damaged"),
    "missing file": (lambda c: (c / "__0_0.distcp").unlink(), "__0_0.distcp: not readable (No such file or directory)"),
    "metadata": (lambda c: flip(c / ".metadata", 1000), ".metadata: damaged"),
    "no metadata": (lambda c: (c / ".metadata").unlink(), ".metadata: not readable (No such file or directory)"),
    "marker": (lambda c: truncate(c / "complete.json", 30), "complete.json: not readable"),
    "marker of strings": (lambda c: edit_json(c / "complete.json", step="8"), "complete.json: not readable (a value is of the wrong type)"),
    "marker of a list": (lambda c: (c / "complete.json").write_text("[]"), "complete.json: not readable"),
    "no marker": (lambda c: (c / "complete.json").unlink(), "complete.json: not readable (No such file or directory)"),
    "hashes": (lambda c: truncate(c / "integrity.json", 5), "integrity.json: not readable"),
    "no hashes": (lambda c: (c / "integrity.json").unlink(), "integrity.json: not readable (No such file or directory)"),
    "path out": (lambda c: edit_json(c / "integrity.json", files={"../../config.yaml": "0"}), "is no file of this checkpoint"),
}


# On two ranks where one of them finds it, or rank 0 reads alone.
PASSED_OVER = [*((1, case) for case in list(CHECKPOINTS)[::2]), (2, "metadata")]
PASSED_OVER_MORE = [*((1, case) for case in list(CHECKPOINTS)[1::2]), (2, "bit flip"), (2, "no hashes")]


@pytest.mark.parametrize("size, case", quick_and_slow(PASSED_OVER, PASSED_OVER_MORE))
def test_damaged_newest_checkpoint_is_passed_over(ranks, half_run, case, size):
    """The one before it is taken, with a warning and an event that name the damaged file, and the damaged one gets another name."""
    run, words = half_run
    damage, sentence = CHECKPOINTS[case]
    damage(run / "checkpoints/step_00000008")
    damaged = snapshot(run / "checkpoints/step_00000008")
    ended = train(ranks, size, [*words, "train.tokens=6144"], stop=(8, 0, "SIGTERM"))
    assert ended.code == 143 and "resumed    step_00000005" in ended.out
    [said] = ended.err.splitlines()
    assert said.startswith("warning: ") and sentence in said
    assert said.endswith("; it is now step_00000008.damaged, and the run goes on from the one before it")
    assert checkpoints(run) == ["step_00000005", "step_00000008", "step_00000008.damaged"], "the same step is saved again"
    assert snapshot(run / "checkpoints/step_00000008.damaged") == damaged
    [event] = [event for event in events(run) if event["event"] == "skipped_checkpoint"]
    assert event["checkpoint"] == "step_00000008" and event["moved_to"] == "step_00000008.damaged"
    assert event["reason"] == said.removeprefix("warning: ").split("; it is now")[0]


def events(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def test_damaged_checkpoints_stay_out_of_the_way(ranks, half_run):
    """Of one step twice, and through a whole run with its retention."""
    run, words = half_run
    for _ in range(2):
        flip(run / "checkpoints/step_00000008/__0_0.distcp", 500_000)
        assert train(ranks, 1, words, stop=(8, 0, "SIGTERM")).code == 143
    ended = train(ranks, 1, words)
    assert ended.code == 0 and "resumed    step_00000008" in ended.out and len(computed(run)) == 12
    assert checkpoints(run) == ["step_00000008.damaged", "step_00000008.damaged_2", "step_00000010", "step_00000012"]


@pytest.mark.parametrize("size", [1, 2])
def test_no_checkpoint_is_whole(ranks, half_run, size):
    """Nothing is begun anew by itself, and nothing is moved."""
    run, words = half_run
    flip(run / "checkpoints/step_00000008/__0_0.distcp", 500_000)
    (run / "checkpoints/step_00000005/.metadata").unlink()
    before = snapshot(run)
    said = refused(ranks, words, size)
    assert "step_00000008/__0_0.distcp: damaged" in said and "step_00000005/.metadata: not readable (No such file" in said
    assert said.endswith(
        f"none of the 2 checkpoints is whole: bring one back from a copy, or move {run / 'checkpoints'} away to begin anew"
    )
    assert snapshot(run) == before
    shutil.rmtree(run / "checkpoints/step_00000005")
    said = refused(ranks, words, size)
    assert said.endswith(f"or move {run / 'checkpoints/step_00000008'} away to begin this run anew")


@pytest.mark.parametrize("size", [1, 2])
def test_finished_run_whose_last_checkpoint_is_damaged_is_finished_again(ranks, half_run, size):
    run, words = half_run
    assert train(ranks, size, words).code == 0
    flip(run / "checkpoints/step_00000012/__0_0.distcp", 200_000)
    ended = train(ranks, size, words)
    assert ended.code == 0 and "resumed    step_00000010" in ended.out and "step_00000012/__0_0.distcp: damaged" in ended.err
    assert checkpoints(run) == ["step_00000010", "step_00000012", "step_00000012.damaged"]
    ended = train(ranks, size, words)
    assert ended.code == 0 and "complete   this run has done all its 12 steps" in ended.out


def test_run_folder_without_its_config(ranks, half_run):
    """Nothing says then which settings its checkpoints belong to."""
    run, words = half_run
    (run / "config.yaml").unlink()
    before = snapshot(run)
    assert refused(ranks, words).startswith(f"{run / 'config.yaml'}: missing, though the folder has checkpoints")
    assert snapshot(run) == before


CHANGES = {
    "model": ["model.gdn.allow_neg_eigval=true", "model.attention.rope_base=20000"],
    "batch": ["train.batch_tokens=1024"],
    "optimizer": ["optimizer.peak_lr=1e-3", "optimizer.weight_decay=0"],
    "schedule": ["schedule.warmup_tokens=2048"],
    "pattern": ["pattern=[{mixer: gdn}]"],
    "seed": ["seed=1"],
    "data": ["data.document_mask=true"],
}


@pytest.mark.parametrize("what", CHANGES)
def test_run_folder_resumed_with_other_settings(ranks, half_run, what):
    run, words = half_run
    before = snapshot(run)
    ended = train(ranks, 1, [*words, *CHANGES[what]])
    assert ended.code == 2
    *differences, way_out = ended.errors
    assert sorted(line.split(":")[0] for line in differences) == sorted(change.split("=")[0] for change in CHANGES[what])
    assert all("this run has" in line and "the recipe now says" in line for line in differences)
    if what == "pattern":
        assert differences[0].endswith("the recipe now says [{mixer: gdn}]")
    assert way_out == f"run_dir={run}: a run resumes only with the settings it began with; undo these or give another run_dir=PATH"
    assert snapshot(run) == before


@pytest.mark.parametrize("size, split, id", [(1, "train", 5000), (2, "train", 5000), (1, "train", 256), (1, "valid", 5000)])
def test_ids_that_are_no_words(ranks, data, tmp_path, size, split, id):
    """Before anything is learnt from them."""
    tokens = np.memmap(data / f"{split}.bin", np.uint16, "r+")
    tokens[7::50] = id
    tokens.flush()
    run = tmp_path / "run"
    ended = train(ranks, size, tiny_words(data, f"run_dir={run}", "validation.interval_steps=1"))
    assert ended.code == 2
    said = f"data.{split}={data / split}: it holds the token {id}, and the words of model.vocab_size=256 are 0 to 255; see what"
    assert ended.errors and all(line.startswith(said) for line in ended.errors)
    assert not (run / "metrics.jsonl").read_text()


def test_all_differences_are_said_at_once(ranks, half_run, tiny_data):
    run, words = half_run
    before = snapshot(run)
    changes = ["model.attention.rope_base=20000", "train.batch_tokens=1024", "schedule.shape=linear", f"data.train={tiny_data / 'valid'}"]
    ended = train(ranks, 2, [*words, *changes])
    assert ended.code == 2
    assert ended.errors[:3] == [
        "model.attention.rope_base: this run has 10000.0, the recipe now says 20000.0",
        "schedule.shape: this run has cosine, the recipe now says linear",
        "train.batch_tokens: this run has 512, the recipe now says 1024",
    ]
    assert ended.errors[3].startswith("data.train: this run has data of fingerprint ") and str(tiny_data / "valid") in ended.errors[3]
    assert len(ended.errors) == 5 and snapshot(run) == before


def test_what_may_change_does(ranks, half_run):
    run, words = half_run
    changes = ["train.micro_batch=1", "train.recompute=full", "checkpoint.keep_last=1", "validation.samples=3", "tracking.log_interval=1"]
    changes += ["model.attention.backend=flash", "model.kernels.linear=te", "model.kernels.norm=te"]
    ended = train(ranks, 2, [*words, *changes])
    assert ended.code == 0 and checkpoints(run) == ["step_00000012"]


@pytest.mark.parametrize("size", [1, 2])
def test_checkpoint_of_another_dataset(ranks, half_run, tiny_data, size):
    run, words = half_run
    before = snapshot(run)
    said = refused(ranks, [*words, f"data.train={tiny_data / 'valid'}"], size)
    assert f"{run / 'checkpoints/step_00000008'} was trained on other data (fingerprint " in said
    assert said.endswith("resume with the same dataset, or give another run_dir")
    assert snapshot(run) == before


def test_dataset_that_moved_is_the_same(ranks, half_run, data):
    """Datasets are known by what they hold."""
    run, words = half_run
    assert train(ranks, 1, [*words, f"data.train={data / 'train'}", f"data.valid={data / 'valid'}"]).code == 0
    assert len(computed(run)) == 12


@pytest.mark.parametrize("size", [1, 2])
def test_two_runs_in_one_folder(ranks, half_run, size):
    run, words = half_run
    before = snapshot(run)
    holder = RunFolder(run)
    try:
        said = refused(ranks, words, size)
    finally:
        holder.close()
    assert said.startswith(f"run_dir={run}: another process is training in this folder")
    assert snapshot(run) == before
    if size == 1:
        assert train(ranks, size, words).code == 0, "once it is free"


@pytest.mark.parametrize("size", [1, 2])
def test_loss_that_is_not_a_number(ranks, tiny_data, tmp_path, size):
    """A learning rate that overflows float32: the run stops, keeps what led there, and resuming does not take it."""
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "optimizer.peak_lr=1e30", "schedule.warmup_tokens=0", "validation.interval_steps=100")
    said = refused(ranks, words, size)
    assert said.startswith("step 2: the loss is nan; the run stops. The parameters after 1 step are in ")
    assert "there is no earlier checkpoint" in said and "A lower optimizer.peak_lr" in said
    assert checkpoints(run) == ["diverged_00000001"]
    assert any(name.endswith("embedding.word_embeddings.weight") for name in tensors(run / "checkpoints/diverged_00000001"))
    assert len(computed(run)) == 1, "the steps before it are in metrics.jsonl"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "failed"
    assert refused(ranks, words, size) == said, "the same again: from the start, since there is no good checkpoint"


def test_diverged_checkpoint_can_be_taken_up(ranks, tiny_data, tmp_path):
    """Renamed by its user to be resumed from, it is a checkpoint like any other."""
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "optimizer.peak_lr=1e30", "schedule.warmup_tokens=0", "validation.interval_steps=100")
    refused(ranks, words)
    (run / "checkpoints/diverged_00000001").rename(run / "checkpoints/step_00000001")
    said = refused(ranks, words)
    assert said.startswith("step 2: the loss is nan") and "the newest good checkpoint is step_00000001" in said


def test_validation_loss_that_is_not_a_number(ranks, tiny_data, tmp_path):
    """Found out before a checkpoint of such parameters stands among the good ones."""
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "optimizer.peak_lr=1e30", "schedule.warmup_tokens=0", "validation.interval_steps=1")
    said = refused(ranks, [*words, "checkpoint.interval_steps=1"])
    assert said.startswith("step 1: the validation loss is nan; the run stops.")
    assert checkpoints(run) == ["diverged_00000001"]


def test_config_of_a_default_run_folder_can_be_read_back(ranks, tiny_data, tmp_path):
    """The default name of a run holds the + of its recipe."""
    run = tmp_path / "a+b"
    words = tiny_words(tiny_data, f"run_dir={run}", "train.tokens=2048")
    assert train(ranks, 1, words, stop=(2, 0, "SIGTERM")).code == 143
    assert train(ranks, 1, words).code == 0
    assert train(ranks, 1, [str(run / "config.yaml")]).code == 0


def test_usage():
    assert Process([]).end().code == 2
    assert "python -m launch train RECIPE" in (CHECKOUT / "launch/train.py").read_text()
