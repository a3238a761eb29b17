"""Recipes: how fragments, bases and overrides lie over each other, and what is said of those that are wrong."""

import pytest

from hybrid_megatron.config import load_recipe, save_config
from hybrid_megatron.config.validate import validate
from hybrid_megatron.errors import ConfigError

VALID = """
bases: [base]
model: {num_layers: 4, hidden_size: 64, num_heads: 8, head_dim: 8, ffn_size: 96, vocab_size: 512}
pattern: [{mixer: gdn}]
train: {tokens: 10240, context: 64, batch_tokens: 512, micro_batch: 2, precision: fp32}
optimizer: {peak_lr: 3.0e-3, weight_decay: 0.1}
schedule: {warmup_tokens: 1024}
data: {train: somewhere}
"""


@pytest.fixture
def recipe(tmp_path):
    """Writes a file and returns its path as typed."""

    def write(text: str = VALID, name: str = "recipe.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def problems(words: list[str], world_size: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(load_recipe(words), world_size)
    assert str(caught.value).splitlines() == caught.value.problems, "one line each"
    return caught.value.problems


def problem(words: list[str], world_size: int = 1) -> str:
    [only] = problems(words, world_size)
    return only


def test_later_words_lie_over_earlier_ones_and_bases_under_all(recipe):
    recipe("seed: 1\ntrain: {micro_batch: 4}\ntracking: {project: mine}\n", "under.yaml")
    first = recipe(VALID.replace("[base]", "[base, under.yaml]"))
    second = recipe("train: {micro_batch: 8}\n", "second.yaml")
    config = load_recipe([f"{first}+{second}", "optimizer.eps=1e-6"])
    assert config.train.micro_batch == 8 and config.seed == 1 and config.tracking.project == "mine"
    assert config.optimizer.eps == 1e-6 and config.validation.samples == 512, "the override, and base.yaml of the house"
    assert load_recipe([f"{second}+{first}"]).train.micro_batch == 2


def test_fragments_by_name():
    config = load_recipe(["776m+gdn_nope_lh+pretrain_4k", "data.train=x"])
    assert (config.model.num_layers, config.train.context, config.name) == (12, 4096, "776m+gdn_nope_lh+pretrain_4k")
    assert [entry.mixer for entry in config.pattern] == ["gdn", "attention"]
    assert config.run_dir.startswith("runs/776m+gdn_nope_lh+pretrain_4k-"), "a hash, since a value was overridden"
    again = load_recipe(["776m+gdn_nope_lh+pretrain_4k", "data.train=x"])
    other = load_recipe(["776m+gdn_nope_lh+pretrain_4k", "data.train=y"])
    assert config.run_dir == again.run_dir != other.run_dir


@pytest.mark.parametrize(
    "override, value",
    [
        ("optimizer.peak_lr=1e-3", 1e-3),
        ("optimizer.peak_lr=1", 1.0),
        ("train.tokens=1_000_000", 1_000_000),
        ("train.tokens=1.5M", 1_500_000),
        ("train.tokens=50B", 50_000_000_000),
        ("data.document_mask=true", True),
        ("data.valid=null", None),
        ("name=a=b", "a=b"),
        ("data.train='with space'", "with space"),
        ("model={num_layers: 8}", {"num_layers": 8}),
        ("pattern=[{mixer: attention, position: nope}]", None),
    ],
)
def test_forms_of_an_override(recipe, override, value):
    config = load_recipe([recipe(), override])
    found = config
    for part in override.partition("=")[0].split("."):
        found = getattr(found, part)
    if override.startswith("model"):
        assert found.num_layers == 8 and found.hidden_size == 64, "a section is laid over, not replaced"
    elif override.startswith("pattern"):
        assert [(entry.mixer, entry.position) for entry in found] == [("attention", "nope")], "a list is replaced"
    else:
        assert found == value and type(found) is type(value)


def test_the_resolved_config_reads_back_unchanged(recipe, tmp_path):
    config = load_recipe([recipe(), "name='a+b: c'", "optimizer.eps=1e-12"])
    (tmp_path / "a+b").mkdir()
    save_config(config, tmp_path / "a+b/config.yaml")
    assert load_recipe([str(tmp_path / "a+b/config.yaml")]) == config


LOADING = {
    "unknown key": (["model.num_layer=3"], "override model.num_layer=3: model.num_layer is not a setting; did you mean model.num_layers?"),
    "unknown section": (["optimiser.eps=3"], "override optimiser.eps=3: optimiser is not a setting; did you mean optimizer?"),
    "key of another section": (["model.peak_lr=3"], "did you mean optimizer.peak_lr?"),
    "key of another mixer": (["model.mamba2.allow_neg_eigval=true"], "model.mamba2.allow_neg_eigval is not a setting; model.mamba2 has "),
    "key with a reason": (
        ["model.rwkv7.value_residual=true"],
        "model.rwkv7.value_residual is not a setting: RWKV-7's would tie v of every layer to that of the first, and a layer of a hybrid "
        "stands by itself; model.rwkv7 has rope_base, decay_rank, rate_rank, gate_rank",
    ),
    "a colon in a value": (
        ["pattern=[{mixer: gdn: 3}]"],
        "override 'pattern=[{mixer: gdn: 3}]': its value is not readable as YAML: while parsing a flow mapping",
    ),
    "string for a number": (["train.context='64'"], "train.context='64': this must be a whole number, written without quotes"),
    "fraction for a whole number": (["train.tokens=1.5"], "train.tokens=1.5: this must be a whole number"),
    "an unknown unit": (["train.tokens=1.5X"], "train.tokens='1.5X': this must be a whole number, such as 4096, 1.5M or 50B"),
    "a unit where no tokens are counted": (["train.context=4K"], "train.context='4K': this must be a whole number"),
    "truth for a number": (["seed=true"], "seed=true: this must be a whole number"),
    "number for a truth": (["data.document_mask=1"], "data.document_mask=1: this must be true or false"),
    "null": (["seed=null"], "seed=null: this must be a whole number"),
    "value for a section": (["model=3"], "model=3: this is a section with keys num_layers,"),
    "value for a list": (["pattern=gdn"], "pattern='gdn': this must be a list, in brackets, e.g. pattern=[...]"),
    "too deep": (["seed.x=3"], "override seed.x=3: seed must be a whole number, with no x below it"),
    "no value": (["seed"], "override 'seed' is not of the form section.key=value"),
    "index": (["pattern[0].mixer=gdn"], "override 'pattern[0].mixer=gdn' is not of the form section.key=value"),
    "double dot": (["model..num_layers=3"], "is not of the form section.key=value"),
    "interpolation": (["name=${nothing}"], "name: Interpolation key 'nothing' not found"),
}


@pytest.mark.parametrize("case", LOADING)
def test_wrong_override(recipe, case):
    words, sentence = LOADING[case]
    assert sentence in problem([recipe(), *words])


FILES = {
    "duplicate key": (VALID + "seed: 1\nseed: 2\n", "found duplicate key seed"),
    "duplicate section": (VALID + "model: {num_layers: 2}\n", "found duplicate key model"),
    "unknown section": (VALID + "trian: {tokens: 3}\n", "recipe.yaml: trian is not a setting; did you mean train?"),
    "empty": ("", "the file holds no settings"),
    "comments alone": ("# nothing\n", "the file holds no settings"),
    "a list": ("- a\n- b\n", "a recipe is a mapping of settings, this file holds a list"),
    "a word": ("hello\n", "hello is not a setting"),
    "no YAML": ("a: [1,\nb: {", "not readable as YAML"),
    "a colon in a value": ("name: a: b\n", "line 1, column 8; mend the file there (a text with a colon takes quotes, and brackets"),
    "binary": ("\x00\x01", "not readable as YAML"),
    "two documents": (VALID + "---\nseed: 3\n", "expected a single document"),
    "a tag that would run code": (VALID + "seed: !!python/object/apply:os.getpid []\n", "could not determine a constructor for the tag"),
    "bases that are no list": ("bases: base\n", "bases must be a list of fragment names or paths, not 'base'"),
    "bases of themselves": ("bases: [recipe.yaml]\n", "bases of recipe.yaml lead back to itself: recipe.yaml -> recipe.yaml; remove one"),
    "bases that do not exist": ("bases: [nowhere]\n", "recipe fragment 'nowhere' is not known; "),
    "a number as key": (VALID + "3: 4\n", "3 is not a setting"),
}


@pytest.mark.parametrize("case", FILES)
def test_wrong_file(recipe, case):
    text, sentence = FILES[case]
    assert sentence in problem([recipe(text)])


def test_bases_that_loop(recipe):
    recipe("bases: [two.yaml]\n", "one.yaml")
    two = recipe("bases: [one.yaml]\n", "two.yaml")
    assert problem([two]) == "bases of two.yaml lead back to itself: two.yaml -> one.yaml -> two.yaml; remove one"


def test_names_of_fragments():
    assert "recipe fragment 'gdn_nop_lh' is not known; did you mean gdn_nope_lh?" in problem(["776m+gdn_nop_lh+pretrain_4k"])
    assert "recipe file none.yaml does not exist" in problem(["none.yaml"])
    assert problem([]).startswith("no recipe given")
    for word in ("seed=3", "pattern=[{mixer: gdn}]"):
        assert problem([word]).startswith(f"{word!r} stands where the recipe belongs: name the recipe first, e.g. 776m")


def test_all_missing_values_are_named_at_once(recipe):
    found = problems([recipe("model: {num_layers: 4}\n")])
    assert "train.tokens is not set: it has no default; set it in a recipe file or as train.tokens=VALUE" in found and len(found) > 10
    assert not any(line.startswith("model.num_layers") for line in found)


RULES = {
    "mixer": (
        ["pattern=[{mixer: gdnn}]"],
        ["pattern[0].mixer=gdnn: there is no such mixer; mixers are attention, swa, gla, gdn, kda, lightning, mamba2, rwkv7"],
    ),
    "position": (["pattern=[{mixer: attention}]"], ["pattern[0].mixer=attention: its position must be rope or nope"]),
    "not finite": (["optimizer.clip_grad=.inf"], ["optimizer.clip_grad=inf: it must be a finite number"]),
    "negative": (["train.tokens=-5"], ["train.tokens=-5: it must be more than 0"]),
    "no validation samples": (["validation.samples=0"], ["validation.samples=0: it must be more than 0"]),
    "seed": (["seed=4294967296"], ["seed=4294967296: it must be less than 2^32"]),
    "beta": (["optimizer.beta1=1"], ["optimizer.beta1=1.0: it must be less than 1"]),
    "pattern length": (["pattern=[{mixer: gdn, repeat: 3}]"], ["pattern: it describes 3 layers and model.num_layers=4 is not"]),
    "empty pattern": (["pattern=[]"], ["pattern: it is empty; name a mixer"]),
    "warm-up": (["schedule.warmup_tokens=10240"], ["schedule.warmup_tokens=10240: it must be less than train.tokens=10240;"]),
    "batch": (["train.batch_tokens=500"], ["train.batch_tokens=500: it must be a multiple of train.context=64, such as 448 or 512"]),
    "micro-batch": (["train.micro_batch=3"], ["train.batch_tokens=512: it holds 8 samples of 64, which must be a multiple of"]),
    "shape": (["schedule.shape=step"], ["schedule.shape=step: it must be one of cosine, linear, constant, wsd"]),
    "least rate above the peak": (["schedule.min_lr=1"], ["schedule.min_lr=1.0: it must not be above optimizer.peak_lr=0.003"]),
    "least rate that is never reached": (
        ["schedule.shape=constant", "schedule.min_lr=1e-4"],
        ["schedule.min_lr=0.0001: schedule.shape=constant never falls to it; set it to 0 or use another shape"],
    ),
    "decay of another shape": (
        ["schedule.shape=linear", "schedule.decay_tokens=512"],
        ["schedule.decay_tokens=512: schedule.shape=linear has no such part; leave it out or set schedule.shape=wsd"],
    ),
    "wsd without decay": (["schedule.shape=wsd"], ["schedule.shape=wsd: it needs schedule.decay_tokens, the tokens of its last, falling"]),
    "no decay": (["schedule.shape=wsd", "schedule.decay_tokens=0"], ["schedule.decay_tokens=0: it must be more than 0"]),
    "decay longer than what is left": (
        ["schedule.shape=wsd", "schedule.decay_tokens=9217"],
        ["schedule.decay_tokens=9217: schedule.warmup_tokens=1024 leaves 9216 of train.tokens=10240; use at most that"],
    ),
    "warm-up, and so decay, longer than the run": (
        ["schedule.shape=wsd", "schedule.decay_tokens=512", "schedule.warmup_tokens=20480"],
        ["schedule.warmup_tokens=20480: it must be less than train.tokens=10240; lower the first or raise the second"],
    ),
    "growing batch without end": (
        ["schedule.start_batch_tokens=128"],
        ["schedule.start_batch_tokens=128: it needs batch_warmup_tokens, over which the batch grows; set both or neither"],
    ),
    "growing batch without start": (
        ["schedule.batch_warmup_tokens=1024"],
        ["schedule.batch_warmup_tokens=1024: it needs start_batch_tokens, from which the batch grows; set both or neither"],
    ),
    "batch that grows longer than the run": (
        ["schedule.start_batch_tokens=128", "schedule.batch_warmup_tokens=10240"],
        ["schedule.batch_warmup_tokens=10240: it must be less than train.tokens=10240; lower the first or raise the second"],
    ),
    "sequence": (["parallel.sequence=true"], ["parallel.sequence=true: it splits over the tensor ranks and parallel.tensor=1"]),
    "recompute": (["train.recompute=all"], ["train.recompute=all: it must be one of none, selective, full"]),
    "virtual without pipeline": (
        ["parallel.virtual_pipeline=2"],
        [
            "parallel.virtual_pipeline=2: it cuts pipeline stages into chunks and parallel.pipeline=1; leave it out or raise "
            "parallel.pipeline"
        ],
    ),
    "attention backend": (
        ["model.attention.backend=triton"],
        ["model.attention.backend=triton: it must be one of auto, cudnn, flash, efficient, math, flex"],
    ),
    "linear layers": (["model.kernels.linear=cublas"], ["model.kernels.linear=cublas: it must be one of torch, te"]),
    "norms": (["model.kernels.norm=torch"], ["model.kernels.norm=torch: it must be one of triton, te"]),
    "wide heads": (
        ["model.head_dim=264"],
        ["model.head_dim=264: flash-linear-attention's kernels of gdn take heads of up to 256 channels; take more heads that are narrower"],
    ),
    "precision": (["train.precision=fp16"], ["train.precision=fp16: it must be one of bf16, fp32"]),
    "world": (["parallel.context=2"], ["parallel: tensor * context * pipeline = 1 * 2 * 1 = 2 must divide the 1 process of this run"]),
    "tensor 3": (
        ["parallel.tensor=3"],
        [
            "parallel.tensor=3: it must divide the units of heads that may not be cut, 8 in layers of gdn; use one of 1, 2, 4, 8",
            "parallel.tensor=3: it must divide model.vocab_size=512; use another tensor size, or 513",
            "parallel: tensor * context * pipeline = 3 * 1 * 1 = 3 must divide the 1 process of this run",
        ],
    ),
}


@pytest.mark.parametrize("case", RULES)
def test_broken_rule(recipe, case):
    words, sentences = RULES[case]
    found = problems([recipe(), *words])
    assert len(found) == len(sentences)
    for line, sentence in zip(found, sentences):
        assert line.startswith(sentence)


def test_a_tensor_size_that_is_named_is_possible():
    """776m has 12 units and an FFN of 4,864, which 3, 6 and 12 do not divide."""
    found = problems(["776m+kda_nope_lh+pretrain_4k", "data.train=unset", "parallel.tensor=8"])
    assert any(sentence.endswith("; use one of 1, 2, 4") for sentence in found), found


TWO_PROCESSES = {
    "chunks that do not divide the layers": (
        ["parallel.pipeline=2", "parallel.virtual_pipeline=3"],
        "parallel.virtual_pipeline=3: pipeline * virtual_pipeline = 2 * 3 must divide model.num_layers=4; with parallel.pipeline=2 use one "
        "of 1, 2",
    ),
    "stages that do not divide the layers": (
        ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "model.num_layers=5"],
        "parallel.pipeline=2: it must divide model.num_layers=5; use one of 1, 5",
    ),
    "micro-batches that are no multiple of the stages": (
        ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "train.batch_tokens=384"],
        "parallel.virtual_pipeline=2: a step has 3 micro-batches on each data-parallel rank, which must be a multiple of "
        "parallel.pipeline=2; make train.batch_tokens=384 a multiple of 256, lower train.micro_batch=2, or leave out virtual_pipeline",
    ),
}


@pytest.mark.parametrize("case", TWO_PROCESSES)
def test_broken_rule_on_two_processes(recipe, case):
    words, sentence = TWO_PROCESSES[case]
    assert problem([recipe(), *words], world_size=2) == sentence


GROWS = ["schedule.batch_warmup_tokens=4096", "train.batch_tokens=1536"]  # 24 samples
START = "the batch grows in steps of it, so it must be less than train.batch_tokens=1536, divide it, and be a multiple of "
START_BATCHES = {
    "full": (1, ["schedule.start_batch_tokens=1536"], "64 * 2 * 1; use one of 128, 256, 384, 512, 768"),
    "too large": (1, ["schedule.start_batch_tokens=3072"], "64 * 2 * 1; use one of 128, 256, 384, 512, 768"),
    "divides no full batch": (1, ["schedule.start_batch_tokens=640"], "64 * 2 * 1; use one of 128, 256, 384, 512, 768"),
    "half a micro-batch": (1, ["schedule.start_batch_tokens=64"], "64 * 2 * 1; use one of 128, 256, 384, 512, 768"),
    "half a sample": (1, ["schedule.start_batch_tokens=96"], "64 * 2 * 1; use one of 128, 256, 384, 512, 768"),
    "data 2": (2, ["schedule.start_batch_tokens=128"], "64 * 2 * 2; use one of 256, 512, 768"),
    "data 2, micro-batch 12": (
        2,
        ["schedule.start_batch_tokens=128", "train.micro_batch=12"],
        "64 * 12 * 2; none is; lower train.micro_batch or",
    ),
}


@pytest.mark.parametrize("case", START_BATCHES)
def test_first_size_of_a_growing_batch(recipe, case):
    size, words, end = START_BATCHES[case]
    said = problem([recipe(), *GROWS, *words], size)
    factors = "train.context * train.micro_batch * data-parallel ranks = "
    assert said.startswith(f"{words[0]}: {START}{factors}{end}")


def test_a_growing_batch_fits_the_interleaved_schedule_in_every_step(recipe):
    virtual = [recipe(), *GROWS, "parallel.pipeline=2", "parallel.virtual_pipeline=2"]
    said = problem([*virtual, "schedule.start_batch_tokens=128"], 2)
    assert said.endswith("data-parallel ranks * parallel.pipeline = 64 * 2 * 1 * 2; use one of 256, 512, 768")
    validate(load_recipe([*virtual, "schedule.start_batch_tokens=256"]), 2)
    validate(load_recipe([recipe(), *GROWS, "parallel.pipeline=2", "schedule.start_batch_tokens=128"]), 2)


def test_what_is_possible_is_possible(recipe):
    for start in (128, 256, 384, 512, 768):
        validate(load_recipe([recipe(), *GROWS, f"schedule.start_batch_tokens={start}"]), 1)
    validate(load_recipe([recipe(), "schedule.shape=wsd", "schedule.decay_tokens=9216"]), 1)


def test_virtual_pipeline_that_fits(recipe):
    virtual = ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]
    validate(load_recipe([recipe(), *virtual]), 2)
    validate(load_recipe([recipe(), *virtual]), 4)
    validate(load_recipe([recipe(), "parallel.pipeline=2", "train.batch_tokens=384"]), 2)


def test_world_size_must_be_divided():
    config = load_recipe(["776m+rope+pretrain_4k", "data.train=x", "parallel.tensor=4"])
    with pytest.raises(ConfigError, match="must divide the 6 processes"):
        validate(config, 6)
    validate(config, 8)


def test_the_quickstart_is_valid():
    validate(load_recipe(["quickstart"]), 1)
