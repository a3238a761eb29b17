"""A fresh run that starts from another's parameters takes these alone, under any layout, and says so."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from hybrid_megatron.checkpoint.load import load_weights
from hybrid_megatron.checkpoint.origin import check_origin, needs_origin
from hybrid_megatron.checkpoint.store import checkpoint_at
from hybrid_megatron.config import RunConfig, load_recipe
from hybrid_megatron.data import build_index_caches, open_dataset
from hybrid_megatron.errors import CheckpointError
from hybrid_megatron.model.hybrid_model import build_chunks
from hybrid_megatron.model.parameter_shapes import parameter_shapes
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.parallel import start
from hybrid_megatron.training.build import build_trainer
from hybrid_megatron.training.schedule import learning_rate
from tests.cpu import cells
from tests.cpu.reference_model import reference_loss
from tests.cpu.runs import checkpoints, computed, contents, differing, snapshot, tensors, train, train_and_watch
from tests.cpu.test_parity import LAYOUTS, first_batch
from tests.cpu.tiny import tiny_config, tiny_words
from tests.cpu.zoo import MATRIX, MIXED

HERE = {"one process": (1, [])} | LAYOUTS
DROPE = "pattern=[{mixer: gdn}, {mixer: attention, position: nope}, {mixer: gdn}, {mixer: attention, position: nope}]"


@pytest.fixture(scope="module")
def origin(ranks, tiny_data, tmp_path_factory) -> Path:
    """A finished run of twenty steps, written by two pipeline stages; its weights are wide enough for attention to depend on RoPE."""
    run = tmp_path_factory.mktemp("origin") / "run"
    assert train(ranks, 2, tiny_words(tiny_data, f"run_dir={run}", "parallel.pipeline=2", "model.init_std=0.2")).code == 0
    return run


@pytest.fixture(scope="module")
def weights(origin) -> dict[str, torch.Tensor]:
    """Its parameters by their global names."""
    return {name: t for name, t in tensors(origin / "checkpoints/step_00000020").items() if not name.startswith("optimizer.")}


def refused(ranks, words: list[str], size: int = 1) -> str:
    ended = train(ranks, size, words)
    assert ended.code == 2
    [said] = ended.errors
    return said


def test_a_run_folder_stands_for_its_newest_checkpoint(origin):
    assert checkpoints(origin) == ["step_00000010", "step_00000020"]
    assert checkpoint_at(origin) == origin / "checkpoints/step_00000020"
    assert checkpoint_at(origin / "checkpoints/step_00000010") == origin / "checkpoints/step_00000010"


def weights_loaded(words: list[str], checkpoint: Path) -> tuple[int, list[tuple]]:
    """(step of the checkpoint, this rank's shards) of a model without optimizer or wrapping."""
    config = load_recipe(words)
    with start(config.parallel, config.seed) as state:
        chunks = build_chunks(config, plan_layers(config), state)
        return load_weights(checkpoint, chunks, state).step, cells._shards(chunks, state)


@pytest.mark.parametrize("layout", ["one process", "tensor 2 + sequence", "context 2", "pipeline 2 x virtual 2", "tensor 2, pipeline 2"])
def test_weights_are_those_of_the_checkpoint_under_every_layout(ranks, tiny_data, origin, weights, layout):
    size, overrides = HERE[layout]
    for name in ("step_00000010", "step_00000020"):
        answers = ranks.run(size, weights_loaded, tiny_words(tiny_data, "run_dir=unused", *overrides), origin / "checkpoints" / name)
        assert {step for step, _ in answers} == {int(name[5:])}
        loaded = cells.assemble([shards for _, shards in answers])
        assert loaded.keys() == weights.keys()
        same = all(torch.equal(loaded[key].float(), weights[key]) for key in weights)
        assert same == (name == "step_00000020")


def fresh(words: list[str], checkpoint: Path) -> tuple[list[tuple], int, list]:
    """((name, parameter, master) of every parameter, moments that are not zero, step counts) of a trainer before its first step."""
    config = load_recipe(words)
    with start(config.parallel, config.seed) as state:
        trainer = build_trainer(config, state, open_dataset(config, "train"), None, checkpoint)
        [part] = trainer.optimizer.chained_optimizers
        held = []
        for name, parameter in trainer.model[0].module.named_parameters():
            group, place = part.model_param_group_index_map[parameter]
            master = part.optimizer.param_groups[group]["params"][place]
            held.append((name, parameter.detach().clone(), master.detach().clone()))
        moments = [moment for state in part.optimizer.state.values() for moment in state.values()]
        return held, sum(int(moment.count_nonzero()) for moment in moments), [group.get("step") for group in part.optimizer.param_groups]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_optimizer_is_fresh_and_its_masters_are_the_loaded_parameters(ranks, tiny_data, origin, weights, precision):
    words = tiny_words(tiny_data, "run_dir=unused", f"train.precision={precision}")
    [(held, moments, steps)] = ranks.run(1, fresh, words, origin / "checkpoints/step_00000020")
    assert moments == 0 and not any(steps)
    assert len(held) == len(weights)
    for name, parameter, master in held:
        assert master.dtype == torch.float32 and torch.equal(master, parameter.float().flatten()), name
        assert torch.equal(parameter, weights[name].to(parameter.dtype)), name


def first_loss(config: RunConfig, weights: dict[str, torch.Tensor]) -> float:
    """Of step 0 with these parameters, by the float64 definition."""
    return reference_loss(config, {name: w.double() for name, w in weights.items()}, *first_batch(config)).item()


@pytest.mark.parametrize("layout", ["one process", "pipeline 2 x virtual 2"])
def test_drope_at_another_context(ranks, tiny_data, tmp_path, origin, weights, layout):
    """The first loss is that of the old parameters without RoPE, by the float64 definition; schedule, steps and data begin anew."""
    size, overrides = HERE[layout]
    run = tmp_path / "run"
    changes = [DROPE, "train.context=128", "train.tokens=3072", f"data.cache_dir={tmp_path / 'cache'}", "train.micro_batch=1"]
    words = tiny_words(tiny_data, f"run_dir={run}", f"init_from={origin}", *changes, *overrides)
    config = load_recipe(words)
    build_index_caches(config)
    ended = train(ranks, size, words)
    checkpoint = origin / "checkpoints/step_00000020"
    assert ended.code == 0 and f"init_from  {checkpoint} (10,240 tokens), its parameters alone" in ended.out and not ended.err
    expected = first_loss(config, weights)
    assert abs(first_loss(load_recipe([*words, DROPE.replace("nope", "rope", 1)]), weights) - expected) > 1e-3, "RoPE makes a difference"
    metrics = computed(run)
    assert len(metrics) == 6
    assert abs(metrics[0]["loss"] - expected) <= 1e-5
    assert metrics[0]["lr"] == learning_rate(config, 0) and metrics[0]["tokens"] == 512
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events[:2]] == ["init_from", "start"]
    assert (events[0]["checkpoint"], events[0]["step"], events[0]["tokens"]) == (str(checkpoint.resolve()), 20, 10_240)


def test_a_run_that_resumes_does_not_read_it_again(ranks, tiny_data, tmp_path, origin):
    """Bitwise the run that never stopped, though what it began from is gone."""
    moved = shutil.copytree(origin, tmp_path / "origin")
    words = tiny_words(tiny_data, f"init_from={moved}", "train.tokens=4096")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(ranks, 1, [*words, f"run_dir={whole}"]).code == 0
    assert train(ranks, 1, [*words, f"run_dir={parts}"], stop=(4, 0, "SIGTERM")).code == 143
    shutil.rmtree(moved)
    assert not needs_origin(load_recipe([*words, f"run_dir={parts}"]))
    assert needs_origin(load_recipe([*words, f"run_dir={tmp_path / 'new'}"]))
    ended = train(ranks, 1, [*words, f"run_dir={parts}"])
    assert ended.code == 0 and "resumed    step_00000004" in ended.out and "init_from" not in ended.out
    assert computed(parts) == computed(whole) and len(computed(whole)) == 8
    events = [json.loads(line)["event"] for line in (parts / "events.jsonl").read_text().splitlines()]
    assert events.count("init_from") == 1 and events.count("start") == 2

    before = snapshot(parts)
    for other in (f"init_from={origin}", "init_from=null"):
        ended = train(ranks, 1, [*words, f"run_dir={parts}", other])
        assert ended.code == 2
        assert ended.errors[0] == f"init_from: this run has {moved}, the recipe now says {other.split('=')[1]}"
    assert snapshot(parts) == before


@pytest.mark.parametrize("size", [1, 2])
def test_no_checkpoint_there(ranks, tiny_data, tmp_path, origin, size):
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}")
    nowhere, empty, partial = tmp_path / "nowhere", tmp_path / "empty", tmp_path / "killed/checkpoints/step_00000010.partial"
    empty.mkdir()
    shutil.copytree(origin / "checkpoints/step_00000010", partial)
    said = refused(ranks, [*words, f"init_from={nowhere}"], size)
    assert said == f"init_from={nowhere}: does not exist; give a run folder or one of its checkpoints"
    for path in (empty, partial.parents[1], partial, tiny_data / "train.bin"):
        said = refused(ranks, [*words, f"init_from={path}"], size)
        assert said == f"init_from={path}: it is neither a complete checkpoint nor a run folder with one; give one of these"
    assert not run.exists()


ITS_LAYERS = "gdn x1, attention (rope) x1, gdn x1, attention (nope) x1"
MISFITS = {
    "width of the MLP": (
        ["model.ffn_size=64"],
        "it holds decoder.layers.0.mlp.linear_fc1.weight as [96, 32], and this model has it as [128, 32]",
        "",
    ),
    "more layers": (
        ["model.num_layers=8"],
        "it lacks decoder.layers.4.input_layernorm.weight, which this model has",
        ", ".join([ITS_LAYERS] * 2),
    ),
    "fewer layers": (
        ["model.num_layers=2", "pattern=[{mixer: gdn}, {mixer: attention, position: rope}]"],
        "it holds decoder.layers.2.input_layernorm.weight, which this model does not have",
        "gdn x1, attention (rope) x1",
    ),
    "another mixer": (
        ["pattern=[{mixer: gdn}]"],
        "it lacks decoder.layers.1.self_attention.mixers.0.out_norm, which this model has",
        "gdn x4",
    ),
}


@pytest.mark.parametrize("size, layout", [(1, []), (2, ["parallel.pipeline=2"])])
@pytest.mark.parametrize("case", MISFITS)
def test_parameters_that_do_not_fit(ranks, tiny_data, tmp_path, origin, case, size, layout):
    overrides, problem, layers = MISFITS[case]
    run = tmp_path / "run"
    said = refused(ranks, tiny_words(tiny_data, f"run_dir={run}", f"init_from={origin}", *overrides, *layout), size)
    checkpoint = origin / "checkpoints/step_00000020"
    apart = f"; its layers are {ITS_LAYERS}, those of this model {layers}" if layers else ""
    assert said == f"init_from={checkpoint}: {problem}; change the model or give another checkpoint{apart}"
    assert not (run / "metrics.jsonl").exists() and not (run / "config.yaml").exists(), "before training"


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_known_without_building_the_model(tiny_data, origin, case):
    """To submitting and preflight, in training's words."""
    overrides, problem, layers = MISFITS[case]
    checkpoint = origin / "checkpoints/step_00000020"
    apart = f"; its layers are {ITS_LAYERS}, those of this model {layers}" if layers else ""
    with pytest.raises(CheckpointError, match=re.escape(f"{checkpoint}: {problem}; change the model or give another checkpoint{apart}")):
        check_origin(tiny_config(tiny_data, "run_dir=unused", f"init_from={origin}", *overrides))


def test_what_may_differ_is_let_pass(tiny_data, origin):
    overrides = (DROPE, "train.context=128", "model.attention.rope_base=500000", "train.precision=bf16", "parallel.tensor=2")
    config = tiny_config(tiny_data, "run_dir=unused", f"init_from={origin}", *overrides)
    assert check_origin(config) == origin / "checkpoints/step_00000020"


def shapes_of_model(words: list[str]) -> dict[str, tuple[int, ...]]:
    config = load_recipe(words)
    with start(config.parallel, config.seed) as state:
        shards = cells._shards(build_chunks(config, plan_layers(config), state), state)
    return {name: tuple(shape) for name, shape, *_ in shards}


@pytest.mark.parametrize("case", MATRIX | MIXED)
def test_shapes_are_those_of_the_model(ranks, tiny_data, case):
    words = tiny_words(tiny_data, "run_dir=unused", *(MATRIX | MIXED)[case])
    [built] = ranks.run(1, shapes_of_model, words)
    assert parameter_shapes(load_recipe(words)) == built


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("damage", ["changed", "missing", "no hashes", "no marker"])
def test_damaged_checkpoint(ranks, tiny_data, tmp_path, origin, damage, size):
    folder = shutil.copytree(origin / "checkpoints/step_00000020", tmp_path / "origin/checkpoints/step_00000020")
    shard = sorted(folder.glob("*.distcp"))[0]
    if damage == "changed":
        contents = bytearray(shard.read_bytes())
        contents[len(contents) // 2] ^= 1
        shard.write_bytes(contents)
    elif damage == "missing":
        shard.unlink()
    else:
        (folder / {"no hashes": "integrity.json", "no marker": "complete.json"}[damage]).unlink()
    said = refused(ranks, tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}", f"init_from={tmp_path / 'origin'}"), size)
    assert said.startswith(f"init_from={folder}/") and said.endswith("; give another checkpoint")
    if damage == "no marker":  # hashes take too long on a login node
        with pytest.raises(CheckpointError, match=re.escape(said.removeprefix("init_from="))):
            check_origin(tiny_config(tiny_data, "run_dir=unused", f"init_from={tmp_path / 'origin'}"))
    assert ("damaged, its contents are not those" if damage == "changed" else "not readable (No such file or directory)") in said


PATTERN = "pattern=[{mixer: swa}, {mixer: attention, position: rope}, {mixer: gdn}, {mixer: attention, position: nope}]"
PRETRAIN = [
    PATTERN, "model.swa.window=8", "model.init_std=0.2", "train.tokens=3072", "schedule.start_batch_tokens=256",
    "schedule.batch_warmup_tokens=1024",
]  # fmt: skip
EXTEND = [
    PATTERN, "model.swa.window=32", "model.init_std=0.2", "model.attention.rope_base=500000",
    "train.context=256", "train.batch_tokens=1024", "train.micro_batch=1", "train.tokens=6144",
    "optimizer.weight_decay=0", "optimizer.peak_lr=1e-3",
    "schedule.shape=wsd", "schedule.warmup_tokens=2048", "schedule.decay_tokens=2048", "checkpoint.interval_steps=100",
]  # fmt: skip


@pytest.fixture(scope="module")
def stages(ranks, tiny_data, tmp_path_factory) -> tuple[Path, list[str]]:
    """The folder of a finished first stage, and the words of a second without `run_dir` and `init_from`, on other data."""
    folder = tmp_path_factory.mktemp("stages")
    assert train(ranks, 2, tiny_words(tiny_data, f"run_dir={folder / 'pretrain'}", *PRETRAIN)).code == 0
    second = tiny_words(tiny_data, f"data.train={tiny_data / 'valid'}", f"data.cache_dir={folder / 'cache'}", *EXTEND)
    build_index_caches(load_recipe([*second, "run_dir=unused"]))
    return folder / "pretrain", second


@pytest.fixture(scope="module")
def extended(ranks, stages, tmp_path_factory) -> tuple[Path, dict[int, list[bytes]]]:
    """The second stage, begun from the first and not stopped, and the samples of its steps."""
    pretrain, second = stages
    run = tmp_path_factory.mktemp("extended") / "run"
    ended, seen = train_and_watch(ranks, 1, [*second, f"run_dir={run}", f"init_from={pretrain}"])
    assert ended.code == 0 and "(3,072 tokens), its parameters alone" in ended.out
    return run, seen


def test_a_second_stage_has_its_own_rates_and_data(ranks, tmp_path, stages, extended):
    """As its recipe alone would have them; only the losses are those of the parameters it began from."""
    pretrain, second = stages
    run, seen = extended
    ended, expected = train_and_watch(ranks, 1, [*second, f"run_dir={tmp_path / 'alone'}"])
    assert ended.code == 0 and seen == expected
    alone, metrics = computed(tmp_path / "alone"), computed(run)
    assert [(line["tokens"], line["lr"]) for line in metrics] == [(line["tokens"], line["lr"]) for line in alone]
    assert [line["lr"] for line in metrics] == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3, 5e-4, 0], rel=1e-12)
    config = load_recipe([*second, "run_dir=unused"])
    assert seen[0] == [row.numpy().tobytes() for row in first_batch(config)[0]]
    began_from = {key: value for key, value in tensors(checkpoint_at(pretrain)).items() if not key.startswith("optimizer.")}
    loss = first_loss(config, began_from)
    assert abs(metrics[0]["loss"] - loss) <= 1e-5 and abs(alone[0]["loss"] - loss) > 1e-2
    for other in ("model.swa.window=8", "model.attention.rope_base=10000"):
        assert abs(first_loss(load_recipe([*second, "run_dir=unused", other]), began_from) - loss) > 1e-4, other


def test_a_second_stage_resumes_bitwise(ranks, tmp_path, stages, extended):
    pretrain, second = stages
    whole, expected = extended
    words = [*second, f"run_dir={tmp_path / 'run'}", f"init_from={pretrain}"]
    ended, before = train_and_watch(ranks, 1, words, stop=(3, 0, "SIGTERM"))
    assert ended.code == 143
    ended, after = train_and_watch(ranks, 1, words)
    assert ended.code == 0 and "resumed    step_00000003 (3,072 tokens)" in ended.out
    assert list(before) == [0, 1, 2] and before | after == expected
    assert computed(tmp_path / "run") == computed(whole)
    final, other = (contents(run / "checkpoints/step_00000006") for run in (tmp_path / "run", whole))
    assert differing(final, other) == []


def test_a_second_stage_does_not_resume_as_another(ranks, tiny_data, stages, extended):
    """Model, data, batch and schedule: every difference is said, and nothing changes."""
    pretrain, second = stages
    run, _ = extended
    before = snapshot(run)
    changes = ["model.swa.window=64", "train.context=64", "train.batch_tokens=512", "schedule.decay_tokens=1024", "data.document_mask=true"]
    ended = train(ranks, 1, [*second, f"run_dir={run}", f"init_from={pretrain}", *changes, f"data.train={tiny_data / 'train'}"])
    assert ended.code == 2
    assert ended.errors[:5] == [
        "data.document_mask: this run has false, the recipe now says true",
        "model.swa.window: this run has 32, the recipe now says 64",
        "schedule.decay_tokens: this run has 2048, the recipe now says 1024",
        "train.batch_tokens: this run has 1024, the recipe now says 512",
        "train.context: this run has 256, the recipe now says 64",
    ]
    assert ended.errors[5].startswith("data.train: this run has data of fingerprint ")
    assert ended.errors[6].startswith(f"run_dir={run}: a run resumes only with the settings it began with")
    assert len(ended.errors) == 7 and snapshot(run) == before
