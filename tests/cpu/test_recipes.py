"""recipes/: every fragment is what its name says, every run of every study is valid, small ones train; what is said of a wrong study."""

import re
from functools import cache

import pytest

from hybrid_megatron.config import EvaluationConfig, RunConfig, load_recipe, load_settings
from hybrid_megatron.config.fragments import FOLDERS, RECIPES, read_yaml
from hybrid_megatron.config.studies import Run, describe, load_study, study_names
from hybrid_megatron.config.study_file import read_study
from hybrid_megatron.config.validate import validate
from hybrid_megatron.config.validate_evaluation import validate_evaluation
from hybrid_megatron.data import build_index_caches
from hybrid_megatron.errors import ConfigError
from hybrid_megatron.model.accounting import account
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.planning.choices import fits
from hybrid_megatron.planning.layout import Layout
from hybrid_megatron.planning.memory import peak_memory
from tests.cpu.cells import losses
from tests.cpu.quick import quick_and_slow

NAMES = {folder: sorted(path.stem for path in (RECIPES / folder).glob("*.yaml")) for folder in FOLDERS}
HYBRID = re.compile(r"(yoco_)?(rope|swa|gla|gdn|kda|lightning|mamba2|rwkv7)_(rope|nope)_(lh|hh)(?:_(\d)to(\d))?")
HYBRIDS = [name for name in NAMES["patterns"] if HYBRID.fullmatch(name)]


def entry(mixer: str, position: str | None = None, **more: int) -> dict:
    return {"mixer": mixer} | ({} if position is None else {"position": position}) | more


def pattern_of(name: str) -> list[dict]:
    """What the name of a hybrid says: [yoco_]EFFICIENT_GLOBAL_LAYOUT[_RATIO], efficient to global 3:1 unless it says otherwise."""
    yoco, efficient, position, layout, many, few = HYBRID.fullmatch(name).groups()
    shares = int(many or 3), int(few or 1)
    mixers = ("attention", "rope") if efficient == "rope" else (efficient,), ("attention", position)
    if layout == "hh":
        return [{"heads": [entry(*mixer, share=share) for mixer, share in zip(mixers, shares)]}]
    if yoco:
        return [entry(*mixer, share=share) for mixer, share in zip(mixers, shares)]
    return [entry(*mixer, **({"repeat": share} if share > 1 else {})) for mixer, share in zip(mixers, shares)]


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_is_what_its_name_says(name):
    assert read_yaml(RECIPES / f"patterns/{name}.yaml") == {"pattern": pattern_of(name)}


def test_all_hybrids_are_there():
    expected = {f"{mixer}_{position}" for mixer in ("swa", "gla", "gdn") for position in ("rope", "nope")} | {"rope_nope"}
    names = {f"{pair}_{layout}{ratio}" for pair in expected for layout in ("lh", "hh") for ratio in ("", "_1to1", "_1to3")}
    names |= {f"yoco_{pair}_lh" for pair in expected}
    names |= {f"{mixer}_nope_{layout}" for mixer in ("kda", "lightning", "mamba2", "rwkv7") for layout in ("lh", "hh")}
    assert set(HYBRIDS) == names


NOPE, ROPE = entry("attention", "nope"), entry("attention", "rope")
SIGMOID = {"output_gate": "sigmoid"}
OTHERS = {
    "rope": {"pattern": [ROPE]},
    "swan_gpt": {"model": {"swa": {"window": 512}}, "pattern": [NOPE, entry("swa", repeat=3)]},
    "hypenet_gla": {"model": {"gla": SIGMOID, "attention": SIGMOID}, "pattern": [NOPE, entry("gla", "rope", repeat=3)]},
    "hypenet_rwkv7": {"model": {"attention": SIGMOID}, "pattern": [NOPE, entry("rwkv7", "rope", repeat=3)]},
    "hypenet_gdn": {
        "model": {"gdn": {"qk_norm": True, "allow_neg_eigval": True} | SIGMOID, "attention": SIGMOID},
        "pattern": [NOPE, entry("gdn", "rope", repeat=3)],
    },
    "hypenet_kda": {
        "model": {"kda": {"qk_norm": True, "allow_neg_eigval": True}, "attention": SIGMOID},
        "pattern": [NOPE, entry("kda", "rope", repeat=3)],
    },
    "hypenet_mamba2": {"model": {"mamba2": SIGMOID, "attention": SIGMOID}, "pattern": [NOPE, entry("mamba2", "rope", repeat=3)]},
} | {
    f"hypenet_lightning{scheme}": {
        "model": {"attention": SIGMOID},
        "pattern": [entry("attention", attention), entry("lightning", lightning, repeat=3)],
    }
    for scheme, attention, lightning in (
        ("", "nope", "rope"), ("_all_rope", "rope", "rope"), ("_all_nope", "nope", "nope"), ("_reversed", "rope", "nope")
    )
}  # fmt: skip


def test_the_other_patterns():
    assert set(NAMES["patterns"]) == {*HYBRIDS, *OTHERS}
    for name, expected in OTHERS.items():
        assert read_yaml(RECIPES / f"patterns/{name}.yaml") == expected, name


def test_every_fragment_begins_with_a_remark_and_stands_in_the_readme():
    readme = (RECIPES / "README.md").read_text()
    for folder, names in (NAMES | {"studies": study_names()}).items():
        for name in names:
            assert (RECIPES / folder / f"{name}.yaml").read_text().startswith("#") or folder == "studies", name
            family = HYBRID.fullmatch(name)
            said = name if family is None else f"{family[2]}_{family[3]}"
            assert f"`{said}`" in readme, name


@cache
def loaded(word: str) -> RunConfig:
    return load_recipe([word, "data.train=unused"])


# --- sizes -------------------------------------------------------------------------------------------------------------------------

SIZES = {"376m": (8, 1024, 3264), "776m": (12, 1536, 4864), "1b": (16, 2048, 6528), "3b": (24, 3072, 9728)}
VOCAB = 128_256


def mixer_params(mixer: str, hidden: int) -> tuple[int, int]:
    """Parameters of one layer of all heads of 128: those that head-wise layers divide, and those that they hold whole (norms, first
    matrices of bottlenecks, RWKV-7's mixes)."""
    heads, ranks = hidden // 128, 3 * 32 * round(5 * hidden**0.5 / 32)
    return {
        "attention": (4 * hidden**2, 0),
        "swa": (4 * hidden**2, 0),
        "gla": (5 * hidden**2 + 16 * hidden + hidden, 16 * hidden + 128),
        "gdn": (5 * hidden**2 + 2 * heads * hidden + 2 * heads, 128),
        # q, k, v, o; W2 and W4 of 128 columns, their biases, beta and A of each head; W1 and W3, a norm
        "kda": (4 * hidden**2 + 2 * (128 + 1) * hidden + heads * hidden + heads, 2 * 128 * hidden + 128),
        "lightning": (5 * hidden**2, 3 * 128),
        "mamba2": (5 * hidden**2 + heads * hidden + 3 * heads, 128),
        "rwkv7": (4 * hidden**2 + ranks * hidden + 7 * hidden, 6 * hidden + ranks * hidden),
    }[mixer]


def total_params(pattern: str, layers: int, hidden: int, ffn: int) -> int:
    total = layers * (3 * hidden * ffn + 2 * hidden) + hidden + 2 * VOCAB * hidden
    if pattern == "rope":
        return total + layers * 4 * hidden**2
    _, efficient, _, layout, many, few = HYBRID.fullmatch(pattern).groups()
    share, other = int(many or 3), int(few or 1)
    for mixer, part in (("attention" if efficient == "rope" else efficient, share), ("attention", other)):
        divided, whole = mixer_params(mixer, hidden)
        total += layers * part * divided // (share + other)
        total += layers * whole if layout == "hh" else layers * part * whole // (share + other)
    return total


@pytest.mark.parametrize("size", SIZES)
def test_parameters_of_every_size_and_pattern(size):
    layers, hidden, ffn = SIZES[size]
    model = loaded(f"{size}+rope+pretrain_4k").model
    assert (model.num_layers, model.hidden_size, model.num_heads * 128, model.ffn_size) == (layers, hidden, hidden, ffn)
    for pattern in ["rope", *HYBRIDS]:
        config = loaded(f"{size}+{pattern}+pretrain_4k")
        validate(config, 8)
        assert account(config, plan_layers(config)).total_params == total_params(pattern, layers, hidden, ffn), pattern


@pytest.mark.parametrize(("size", "millions"), [("376m", 375.9), ("776m", 776.2), ("1b", 1431), ("3b", 3846)])
def test_grouped_queries_behind_any_model(size, millions):
    """k and v half as wide: 3 hidden^2 a layer; with an FFN of 3.5 hidden about the parameters of the model without."""
    layers, hidden, _ = SIZES[size]
    config = loaded(f"{size}+gqa+rope+pretrain_4k")
    assert (config.model.num_kv_heads, config.model.ffn_size) == (hidden // 256, hidden * 7 // 2)
    found = account(config, plan_layers(config)).total_params
    assert found == layers * (3 * hidden**2 + 3 * hidden * hidden * 7 // 2 + 2 * hidden) + hidden + 2 * VOCAB * hidden
    assert found / 1e6 == pytest.approx(millions, abs=0.06 if millions < 1000 else 1)
    validate(loaded(f"{size}+gqa+swa_nope_lh+pretrain_4k"), 8)


def test_hypenet_of_500m():
    hidden, vocab = 1024, 50_304
    common = 28 * (3 * hidden * 2944 + 2 * hidden) + hidden + 2 * vocab * hidden
    for pattern, attention, other in (
        ("hypenet_lightning", 5 * hidden**2, 5 * hidden**2 + 3 * 128),
        ("hypenet_gla", 5 * hidden**2, sum(mixer_params("gla", hidden))),
        ("hypenet_gdn", 5 * hidden**2, sum(mixer_params("gdn", hidden)) + 2 * 128),  # QK norm
        ("hypenet_kda", 5 * hidden**2, sum(mixer_params("kda", hidden)) + 2 * 128),
        ("hypenet_mamba2", 5 * hidden**2, sum(mixer_params("mamba2", hidden))),
        ("hypenet_rwkv7", 5 * hidden**2, sum(mixer_params("rwkv7", hidden))),
        ("swan_gpt", 4 * hidden**2, 4 * hidden**2),
        ("rope", 4 * hidden**2, 4 * hidden**2),
    ):
        config = loaded(f"hypenet_500m+{pattern}+hypenet_4k")
        found = account(config, plan_layers(config)).total_params
        assert found == common + 7 * attention + 21 * other, pattern
        assert abs(found / 1e6 - 500) < 35, pattern
    plan = plan_layers(loaded("hypenet_500m+hypenet_lightning+hypenet_4k"))
    assert [layer.groups[0].mixer for layer in plan] == ["attention", "lightning", "lightning", "lightning"] * 7


def test_stages():
    short, long = loaded("376m+swa_rope_lh+pretrain_4k"), load_recipe(["376m+swa_rope_lh+extend_32k", "data.train=x", "init_from=y"])
    hypenet = loaded("hypenet_500m+rope+hypenet_4k")
    for config, context, tokens, batch, lr, decay, warmup, base, shape in (
        (short, 4096, 50e9, 2**20, 1e-3, 0.1, 0.5e9, 10_000, "cosine"),
        (long, 32_768, 5e9, 2**19, 1e-3, 0, 1e9, 500_000, "cosine"),
        (hypenet, 4096, 20e9, 2**19, 5e-4, 0.1, 0.2e9, 10_000, "wsd"),
    ):
        train, optimizer, schedule = config.train, config.optimizer, config.schedule
        assert (train.context, train.tokens, train.batch_tokens) == (context, tokens, batch)
        assert (optimizer.peak_lr, optimizer.weight_decay) == (lr, decay)
        assert (schedule.warmup_tokens, schedule.min_lr, schedule.shape) == (warmup, 0, shape)
        assert (config.model.attention.rope_base, config.model.swa.rope_base, config.model.swa.window) == (base, 10_000, 128)
        assert config.validation.samples * train.context == 2**21, "as many tokens at any context"
    assert hypenet.schedule.decay_tokens == 2_500_000_000 and short.schedule.decay_tokens is None
    with pytest.raises(ConfigError, match="init_from is not set"):
        loaded("376m+rope+extend_32k")


def test_windows_and_their_bases():
    for window, base in ((256, 9e4), (512, 7e5), (1024, 6e6), (2048, 5e7), (4096, 4e8)):
        model = load_recipe([f"776m+swa_nope_lh+extend_32k+window_{window}", "data.train=x", "init_from=y"]).model
        assert (model.swa.window, model.swa.rope_base, model.attention.rope_base) == (window, base, 500_000)


# --- studies -------------------------------------------------------------------------------------------------------------------------


@cache
def all_runs() -> dict[str, Run]:
    return {f"{name}/{run.name}": run for name in study_names() for run in load_study(name).runs}


@pytest.mark.parametrize("name", study_names())
def test_every_run_of_a_study_is_valid_and_fits(name):
    for run in load_study(name).runs:
        config = loaded(f"{name}:{run.name}")
        validate(config, run.gpus)
        assert fits(peak_memory(Layout(config, plan_layers(config), run.gpus))), run.name
        assert (config.name, config.run_dir) == (run.name, f"runs/{name}/{run.name}")
        assert run.gpus == (16 if run.name.startswith("3b+") else 8)
        if run.init_from is None:
            assert config.init_from is None
            continue
        assert config.init_from == f"runs/{run.init_from}"
        start = loaded(run.init_from.replace("/", ":"))
        assert start.train.context < config.train.context
        mixers = [[(group.mixer, group.heads) for layer in plan_layers(c) for group in layer.groups] for c in (start, config)]
        assert mixers[0] == mixers[1], "the parameters fit"
        assert account(start, plan_layers(start)).total_params == account(config, plan_layers(config)).total_params


def test_names_of_runs():
    keys = [run.run_dir.lower() for run in all_runs().values()]
    assert len(keys) == len(set(keys)) == 245
    assert all(re.fullmatch(r"[a-z0-9_.+-]+", run.name, re.I) and len(run.name) < 100 for run in all_runs().values())
    trained = [(run.words, run.init_from) for run in all_runs().values()]
    assert len(set(trained)) == len(trained), "nothing is trained twice"


@pytest.mark.parametrize("name", study_names())
def test_every_evaluation_of_a_study_is_valid(name):
    study = load_study(name)
    for evaluation in study.evaluations:
        folder, *settings = evaluation.arguments()
        assert folder == all_runs()[evaluation.run].run_dir
        validate_evaluation(load_settings(EvaluationConfig, settings), loaded(evaluation.run.replace("/", ":")), 1)
    pairs = [(evaluation.run, evaluation.name) for evaluation in study.evaluations]
    assert len(set(pairs)) == len(pairs)
    assert {run for run, _ in pairs} >= {f"{name}/{run.name}" for run in study.runs}, "each run is evaluated"


def test_described():
    text = describe(load_study("learning_rates"))
    assert (
        "776m+gdn_nope_lh+extend_32k+lr_2e-4  8     main/776m+gdn_nope_lh+pretrain_4k  776m+gdn_nope_lh+extend_32k optimizer.peak_lr=2e-4"
        in text
    )
    assert "  main/776m+gdn_nope_lh+extend_32k" in text and "9 of plain: lengths=[4096," in text


STUDY = """
purpose: A test
shows: [nothing]
axes:
  size: [376m, 776m]
  lr: [{slow: optimizer.peak_lr=1e-5}, {fast: [optimizer.peak_lr=1e-2, schedule.min_lr=1e-4]}]
gpus: {776m: 16}
lengths: [4096]
runs:
  - recipe: <size>+rope+pretrain_4k
  - recipe: <size>+rope+extend_32k+<lr>
    init_from: <size>+rope+pretrain_4k
    note: both
also: [{runs: main/<size>+rope+extend_32k}]
evaluations:
  - runs: <size>+rope+extend_32k+<lr>
    settings: {plain: [], ntk: inference.dynamic_ntk=true}
"""


def study(tmp_path, text: str):
    (tmp_path / "made.yaml").write_text(text)
    return read_study(tmp_path / "made.yaml")


def test_a_study_is_multiplied_out(tmp_path):
    made = study(tmp_path, STUDY)
    assert [run.name for run in made.runs] == [
        "376m+rope+pretrain_4k", "776m+rope+pretrain_4k", "376m+rope+extend_32k+slow", "376m+rope+extend_32k+fast",
        "776m+rope+extend_32k+slow", "776m+rope+extend_32k+fast",
    ]  # fmt: skip
    fast = made["776m+rope+extend_32k+fast"]
    assert fast == Run(
        "made",
        fast.name,
        ("776m+rope+extend_32k", "optimizer.peak_lr=1e-2", "schedule.min_lr=1e-4"),
        "made/776m+rope+pretrain_4k",
        16,
        "both",
    )
    start = "init_from=runs/made/776m+rope+pretrain_4k"
    assert fast.arguments() == [*fast.words, f"name={fast.name}", f"run_dir=runs/made/{fast.name}", start]
    assert made.also == ("main/376m+rope+extend_32k", "main/776m+rope+extend_32k")
    assert len(made.evaluations) == 8
    assert made.evaluations[1].arguments() == [
        "runs/made/376m+rope+extend_32k+slow", "name=ntk", "lengths=[4096]", "inference.dynamic_ntk=true"
    ]  # fmt: skip


WRONG = {
    "a key": ("purpose:", "porpose:", "porpose is not a key of a study; did you mean purpose?"),
    "a key of a run": ("init_from:", "init_form:", "runs[1].init_form is not a key of a study; did you mean init_from?"),
    "a fragment": ("+rope+pretrain_4k", "+roqe+pretrain_4k", "runs[0]: recipe fragment 'roqe' is not known; did you mean rope?"),
    "a fragment with an axis": ("376m,", "367m,", "recipe fragment '367m' is not known; did you mean 376m?"),
    "an axis": ("- recipe: <size>+rope+pre", "- recipe: <sise>+rope+pre", "runs[0]: <sise> is no axis; did you mean size?"),
    "an override": ("peak_lr=1e-5", "peek_lr=1e-5", "axes.lr: override optimizer.peek_lr=1e-5: optimizer.peek_lr is not a setting"),
    "a value": ("peak_lr=1e-5", "peak_lr=x", "optimizer.peak_lr='x': this must be a number"),
    "a setting": ("dynamic_ntk=true", "dynamic_ntx=true", "evaluations[0].settings.ntk: override inference.dynamic_ntx=true"),
    "a start": ("init_from: <size>+rope", "init_from: <size>+ropo", "no run further up has that name; did you mean 376m+rope+pretrain_4k?"),
    "two of a name": ("+extend_32k+<lr>\n    init", "+extend_32k+<lr>\n    name: <size>\n    init", "two runs are named 376m; tell them"),
    "a name": ("    note", "    name: a b <size> <lr>\n    note", "a run cannot be named 'a b 376m slow'"),
    "a word with GPUs": ("{776m: 16}", "{767m: 16}", "gpus.767m: no recipe has this word; did you mean 776m?"),
    "an axis not used": ("axes:\n", "axes:\n  spare: [x]\n", "axes.spare: nothing uses it"),
    "an axis that the recipe has not": ("init_from: <size>", "init_from: <lr><layout>", "which the recipe has not"),
    "no runs": ("runs:\n  - recipe: <size>+rope+pretrain_4k", "runs: 3\nx:\n  - recipe: y", "runs=3: this must be a list, and not empty"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_study(tmp_path, case):
    old, new, sentence = WRONG[case]
    assert old in STUDY
    with pytest.raises(ConfigError) as caught:
        study(tmp_path, STUDY.replace(old, new, 1))
    assert any(sentence in problem for problem in caught.value.problems), caught.value.problems
    assert all(problem.startswith("study made: ") for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("mian:x", "study 'mian' is not known; did you mean main?"),
        ("main:776m+rope+pretrain_4", "main:776m+rope+pretrain_4: study main has no such run; did you mean 776m+rope+pretrain_4k?"),
        ("776m+window_265+pretrain_4k", "recipe fragment 'window_265' is not known; did you mean window_256?"),
    ],
)
def test_runs_by_name(word, sentence):
    with pytest.raises(ConfigError) as caught:
        load_recipe([word])
    assert sentence in str(caught.value)


def test_references_to_other_studies(monkeypatch, tmp_path):
    monkeypatch.setattr("hybrid_megatron.config.studies.STUDIES", tmp_path)
    for name, text in (("one", STUDY.replace("main/", "twa/")), ("two", STUDY.replace("main/", "two/"))):
        (tmp_path / f"{name}.yaml").write_text(text)
    with pytest.raises(ConfigError, match="study one: also: study 'twa' is not known; did you mean two?"):
        load_study("one")
    with pytest.raises(ConfigError, match="study two: also: two:376m.* has no such run; did you mean 376m.rope.extend_32k.slow"):
        load_study("two")


# --- trainings -----------------------------------------------------------------------------------------------------------------------

TRAINED = [
    "376m+rope+pretrain_4k", "1b+rope_nope_lh+extend_32k", "776m+rope_nope_hh_1to1+extend_32k", "776m+swa_rope_hh+extend_32k+window_2048",
    "776m+swa_nope_lh_1to3+pretrain_4k", "376m+gqa+gla_nope_hh+pretrain_4k", "3b+gla_rope_lh_1to1+extend_32k",
    "776m+gdn_nope_hh+extend_32k", "776m+gdn_rope_hh_1to3+pretrain_4k", "776m+yoco_gdn_nope_lh+pretrain_4k",
    "776m+yoco_swa_rope_lh+extend_32k+longce",
    "1b+lightning_nope_hh+pretrain_4k", "hypenet_500m+hypenet_rwkv7+hypenet_4k", "hypenet_500m+swan_gpt+hypenet_4k",
]  # fmt: skip
TRAINED_MORE = [f"hypenet_500m+{pattern}+hypenet_4k" for pattern in OTHERS if pattern not in ("hypenet_rwkv7", "swan_gpt")]


@pytest.fixture(scope="module")
def tiny_datasets(tiny_data, tmp_path_factory) -> list[str]:
    """Words that put the tiny data, with index maps for this context, into a recipe."""
    words = [f"data.train={tiny_data}/train", f"data.valid={tiny_data}/valid", f"data.cache_dir={tmp_path_factory.mktemp('cache')}"]
    build_index_caches(load_recipe(["376m+rope+pretrain_4k+tiny", *words]))
    return words


@pytest.mark.parametrize("recipe", quick_and_slow(TRAINED, TRAINED_MORE))
def test_miniatures_train(ranks, tiny_datasets, tmp_path, recipe):
    [lines] = ranks.run(1, losses, [f"{recipe}+tiny", *tiny_datasets, f"run_dir={tmp_path}"])
    assert [line["step"] for line in lines] == [1, 2]
    assert all(5 < line["lm_loss"] < 6.5 and line["grad_norm"] > 0 for line in lines), "ln 256 is 5.5"


REST = [
    f"376m+{path.stem}+{stage}"
    for path in sorted((RECIPES / "patterns").glob("*.yaml"))
    for stage in (["hypenet_4k"] if path.stem.startswith(("hypenet", "swan")) else ["pretrain_4k", "extend_32k"])
]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", REST)
def test_every_pattern_trains_in_miniature_in_every_stage(ranks, tiny_datasets, tmp_path, recipe):
    [lines] = ranks.run(1, losses, [f"{recipe}+tiny", *tiny_datasets, f"run_dir={tmp_path}"])
    assert [line["step"] for line in lines] == [1, 2] and all(5 < line["lm_loss"] < 6.5 for line in lines)


def test_two_stages_in_miniature(ranks, tiny_datasets, tmp_path):
    """RoPE in both stages' windows, and the global RoPE removed in the second: nothing but its parameters comes over."""
    [short] = ranks.run(1, losses, ["776m+swa_rope_hh+pretrain_4k+tiny", *tiny_datasets, f"run_dir={tmp_path}/short", "train.tokens=8192"])
    more = [f"run_dir={tmp_path}/long", f"init_from={tmp_path}/short"]
    [long] = ranks.run(1, losses, ["776m+swa_nope_hh+extend_32k+window_512+tiny", *tiny_datasets, *more])
    assert [line["step"] for line in long] == [1, 2]
    assert long[0]["lm_loss"] < short[0]["lm_loss"] - 0.01
