"""`python -m launch plan`: the whole, mistakes, groups of ranks, choices, pace, studies. Of its memory: test_plan_memory.py."""

import io
import json
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace

import pytest

from hybrid_megatron.config import load_recipe
from hybrid_megatron.config.studies import load_study
from hybrid_megatron.config.study import Run, Study
from hybrid_megatron.config.validate import validate
from hybrid_megatron.model.mixers import MIXERS
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.parallel.rank_grid import rank_groups, within_nodes
from hybrid_megatron.planning import choices
from hybrid_megatron.planning.layout import Layout
from hybrid_megatron.planning.memory import GIB, peak_memory
from hybrid_megatron.planning.pace import MEASURED_MFU, expected_mfu, measured_mfu, pace
from hybrid_megatron.planning.plan import BY_GPUS, make_plan
from launch import plan as plan_command
from megatron.core.parallel_state import RankGenerator
from tests.cpu import plan_cells
from tests.cpu.plan_cells import recipe
from tests.cpu.runs import CHECKOUT, Ended
from tests.cpu.tiny import tiny_words

VOCAB = 128_256


def command(*words: str) -> Ended:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            plan_command.main(list(words))
        except SystemExit as end:
            code = end.code
    return Ended(code, out.getvalue(), err.getvalue())


def numbers(*words: str) -> dict:
    ended = command(*words, "--json")
    assert ended.code == 0 and not ended.err, ended
    return json.loads(ended.out)


# --- the whole ----------------------------------------------------------------------------------------------------------------------


def test_closed_forms():
    """376m with attention everywhere: q k v o, SwiGLU, two norms a layer; embedding and output layer; six FLOPs a weight and the scores."""
    found = numbers("376m+rope+pretrain_4k", "--gpus", "8,16", "--mfu", "0.5")
    matrices = 8 * (4 * 1024**2 + 3 * 1024 * 3264)
    assert found["parameters"]["total"] == matrices + 17 * 1024 + 2 * VOCAB * 1024
    assert sum(found["parameters"]["parts"].values()) == found["parameters"]["total"]
    assert found["parameters"]["parts"]["embedding"] == VOCAB * 1024
    flops = 6 * (matrices + VOCAB * 1024) + 8 * 12 * 1024 * 4097 / 2
    assert found["flops_per_token"] == pytest.approx(flops, rel=1e-12)
    assert found["steps"] == 47_684 and found["steps"] * 2**20 >= 50e9 > (found["steps"] - 1) * 2**20
    for gpus, micro_batches in ((8, 4), (16, 2)):
        batch = {"samples": 256, "data": gpus, "micro_batches": micro_batches, "micro_batch": 8, "tokens": 2**20}
        assert found["batch"][str(gpus)] == batch
        at = found["time"][str(gpus)]
        assert at["tokens_per_second_per_gpu"] == pytest.approx(0.5 * 989e12 / flops)
        assert at["hours"] * gpus == pytest.approx(at["gpu_hours"])
        assert at["gpu_hours"] == pytest.approx(47_684 * 2**20 * flops / 0.5 / 989e12 / 3600)
        assert at["step_seconds"] == pytest.approx(2**20 * flops / 0.5 / 989e12 / gpus)
        params = found["parameters"]["total"] / GIB
        saved = {"disk": 14 * params, "copy": 14 * params / gpus, "gather": (24 + 12 / gpus) * params}
        assert found["checkpoint_gib"][str(gpus)] == pytest.approx(saved), "bf16, and three float32 tensors of the optimizer"
    assert found["schedule"][0]["lr"] == pytest.approx(1e-3 * 2**20 / 5e8) and found["schedule"][-1]["lr"] == 0
    assert [point["step"] for point in found["schedule"]][1::4] == [476, 47_684], "the warm-up ends, the run ends"


def test_keys():
    """Every documented key is there, on every number of GPUs, also where the recipe does not run on it."""
    found = numbers("776m+gdn_nope_lh+pretrain_4k", "--gpus", "8,12")
    whole = {"recipe", "run_dir", "problems", "layers", "parameters", "flops_per_token", "forward_flops_per_token", "state_bytes"}
    assert set(found) == whole | {"tokens", "steps", "schedule", "possible_sizes", *BY_GPUS}
    assert all(set(found[key]) == {"8", "12"} for key in BY_GPUS)
    assert found["problems"]["8"] == [] and "must be a multiple of train.micro_batch * data-parallel ranks" in found["problems"]["12"][0]
    assert found["memory_gib_per_gpu"]["12"] is None and found["suggestion"]["12"] is not None
    at = found["memory_gib_per_gpu"]["8"]
    assert {"peak", "moment", "stage", "weights", "gradients", "optimizer", "activations", "context", "device", "usable", "fits"} <= set(at)
    assert set(found["rank_grid"]["8"]["groups"]) == {"tensor", "context", "data", "pipeline", "data_context"}
    assert set(found["communication_gib_per_step"]["8"]) == {"gradients", "parameters", "tensor", "context", "pipeline"}
    assert found["layers"].startswith("gdn x3, attention (nope) x1, gdn x3")


def test_a_growing_batch():
    grows = ["schedule.start_batch_tokens=262_144", "schedule.batch_warmup_tokens=1_000_000_000"]
    found = numbers("376m+rope+pretrain_4k", *grows, "--gpus", "8")
    points = found["schedule"]
    assert points[0]["batch_tokens"] == 2**18 and points[-1]["batch_tokens"] == 2**20
    assert found["steps"] == recipe("376m+rope+pretrain_4k", *grows).num_steps > 47_684
    assert any(point["batch_tokens"] == 2**20 and point["tokens"] <= 1_000_000_000 + 2 * 2**20 for point in points), "the first full batch"


def test_a_process_of_its_own_is_quick_and_says_it_all(tmp_path):
    began = time.monotonic()
    words = ["3b+gdn_nope_lh+pretrain_4k", "parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2", "--gpus", "16"]
    done = subprocess.run(
        [sys.executable, "-m", "launch", "plan", *words, "--plot", str(tmp_path / "plan.png")], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == ""
    assert time.monotonic() - began < 60, "5 s alone; two cores may be shared with much else"
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    for said in (
        "4,018,329,696",
        "tensor: [0-1], [2-3]",
        "pipeline: [0 8], [1 9]",
        "GiB of 139",
        "52.4 GiB on disk; host memory a GPU: ",
        "suggested",
        "47,684 for 50,000,000,000 tokens",
    ):
        assert said in done.stdout


# --- mistakes -----------------------------------------------------------------------------------------------------------------------


def test_an_invalid_recipe_is_planned_as_far_as_possible_and_exits_with_2():
    ended = command("776m+rope+pretrain_4k", "parallel.tensor=5", "schedule.min_lr=1", "--gpus", "8,16")
    assert ended.code == 2 and "776,246,784" in ended.out and "47,684" in ended.out
    assert [problem.split(":")[0] for problem in ended.errors] == ["parallel.tensor=5"] * 3 + [
        "schedule.min_lr=1.0",
        "parallel",
        "parallel",
    ]


@pytest.mark.parametrize(
    "word, key, value",
    [
        ("pattern=[{mixer: attention, position: nope, repeat: 5}]", "layers", None),
        ("model.num_kv_heads=5", "layers", None),
        ("schedule.shape=wsd", "schedule", None),
        ("train.micro_batch=0", "problems", {"recipe": [], "8": ["train.micro_batch=0: it must be more than 0"]}),
    ],
)
def test_broken_parts_are_left_out(word, key, value):
    ended = command("776m+rope+pretrain_4k", word, "--gpus", "8", "--json")
    assert ended.code == 2 and json.loads(ended.out)[key] == value and ended.errors
    assert command("776m+rope+pretrain_4k", word, "--gpus", "8").out.startswith("recipe      776m+rope+pretrain_4k")


@pytest.mark.parametrize(
    "words, said",
    [
        (["--gpus", "8,x"], "--gpus 8,x: these must be numbers of GPUs"),
        (["--gpus", "0"], "--gpus 0: these must be numbers of GPUs"),
        (["--gpus"], "--gpus: a value must follow"),
        (["--study"], "--study: a value must follow, one of drope, hypenet,"),
        (["--mfu", "40"], "--mfu 40: it must be a share of the peak"),
        (["--mfu=nan"], "--mfu nan: it must be a share of the peak"),
        (["--jsn"], "plan has no option --jsn"),
        (["--study", "ablation"], "--study: it plans the study's own runs"),
        (["--plot", "nowhere/plan.png"], "--plot nowhere/plan.png: not written: "),
        (["model.num_layer=3"], "override model.num_layer=3: model.num_layer is not a setting"),
    ],
)
def test_mistakes_on_the_command_line(words, said):
    ended = command("376m+rope+pretrain_4k", *words)
    assert ended.code == 2 and len(ended.errors) == 1 and ended.errors[0].startswith(said)


def test_a_number_of_gpus_that_was_not_asked_for_is_no_mistake():
    """The tiny batch fits 8 GPUs and not 16, both of which are planned unless asked."""
    ended = command("776m+gdn_nope_lh+pretrain_4k+tiny", "pattern=[{mixer: gdm}]")
    assert ended.code == 2 and len(ended.errors) == 1 and "there is no such mixer" in ended.errors[0]


def test_too_much_memory_is_said_and_is_no_error():
    ended = command("3b+rope+pretrain_4k", "train.micro_batch=16", "--gpus", "8")
    assert ended.code == 0 and "DOES NOT FIT in the 128 usable" in ended.out and "too much" in ended.out


# --- ranks --------------------------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "tensor 2, context 2": ["parallel.tensor=2", "parallel.context=2"],
    "tensor 2, data 2": ["parallel.tensor=2"],
    "context 2, pipeline 2": ["parallel.context=2", "parallel.pipeline=2"],
    "data 2, pipeline 2": ["parallel.pipeline=2"],
    "context 2, data 2": ["parallel.context=2"],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_rank_groups_are_megatrons(ranks, tiny_data, name):
    words = tiny_words(tiny_data, "run_dir=unused", *LAYOUTS[name])
    expected = rank_groups(load_recipe(words).parallel, 4)
    for rank, found in enumerate(ranks.run(4, plan_cells.groups, words)):
        for kind, mine in found.items():
            assert mine == next(group for group in expected[kind] if rank in group), kind


@pytest.mark.parametrize("tensor, context, pipeline, gpus", [(2, 2, 2, 16), (4, 1, 3, 24), (1, 4, 2, 32), (8, 2, 1, 64)])
def test_rank_groups_of_larger_worlds(tensor, context, pipeline, gpus):
    parallel = replace(recipe("376m+rope+pretrain_4k").parallel, tensor=tensor, context=context, pipeline=pipeline)
    found = rank_groups(parallel, gpus)
    megatron = RankGenerator(tensor, 1, gpus // (tensor * context * pipeline), pipeline, context, "tp-cp-ep-dp-pp")
    for kind, token in {"tensor": "tp", "context": "cp", "data": "dp", "pipeline": "pp", "data_context": "dp-cp"}.items():
        assert found[kind] == sorted(sorted(group) for group in megatron.get_ranks(token)), kind
    assert within_nodes(found["tensor"]) and within_nodes(found["context"]) == (tensor * context <= 8)


# --- choices ----------------------------------------------------------------------------------------------------------------------------


def test_possible_sizes():
    found = numbers("776m+gdn_nope_hh+pretrain_4k", "--gpus", "8")["possible_sizes"]
    assert found["units"] == {"9 gdn + 3 attention (nope) heads": 3}
    assert found["tensor"] == [1], "three units, and an FFN of 4,864 = 2^8 x 19"
    assert found["context"] == [1, 2, 4, 8, 16, 32, 64] and found["pipeline"] == [1, 2, 3, 4, 6, 12]
    assert found["virtual_pipeline"]["3"] == [1, 2, 4]
    words = ["776m+gdn_nope_lh+pretrain_4k", "parallel.context_attention=all_to_all", "parallel.context_linear=all_to_all", "--gpus", "8"]
    assert numbers(*words)["possible_sizes"]["context"] == [1, 2, 4], "divisors of 12 heads and of 2,048"
    assert numbers(*words, "parallel.tensor=4")["possible_sizes"]["context"] == [1], "three heads on a rank"
    assert numbers(*words)["possible_sizes"]["tensor"] == [1, 2, 4]


@pytest.mark.parametrize(
    "words, gpus",
    [
        (["776m+gdn_nope_lh+pretrain_4k"], 8),
        (["776m+gdn_nope_hh+pretrain_4k", "train.context=32_768", "train.batch_tokens=524_288"], 8),
        (["3b+rope+pretrain_4k", "train.micro_batch=32"], 16),
        (["3b+gdn_nope_lh+pretrain_4k", "train.context=131_072", "train.batch_tokens=1_048_576"], 8),
        (["376m+swa_nope_hh+pretrain_4k", "parallel.tensor=7"], 8),
    ],
)
def test_the_suggestion_fits_validates_and_keeps_the_rule(words, gpus):
    """Pasted behind the recipe it is valid and fits; no layout that the rule puts before it does."""
    config = recipe(*words)
    plan = make_plan(config, [gpus])
    suggestion = plan["suggestion"][str(gpus)]
    pasted = recipe(*words, *suggestion["overrides"])
    validate(pasted, gpus)
    of = Layout(pasted, plan_layers(pasted), gpus)
    assert peak_memory(of) == suggestion["memory_gib"] * GIB <= choices.USABLE * choices.H200_GIB * GIB
    assert pace(of)["hours"] == suggestion["hours"]

    def rank(of: Layout) -> tuple:
        parallel, train = of.config.parallel, of.config.train
        place = choices.RECOMPUTE.index(train.recompute)
        return -expected_mfu(of), place, parallel.tensor, parallel.context, parallel.pipeline, -train.micro_batch

    for recompute in choices.RECOMPUTE:
        for micro_batch in (1, 2, 4, 8, 16, 32):
            other = replace(config, train=replace(config.train, recompute=recompute, micro_batch=micro_batch))
            for candidate in choices.layouts(other, of.plan, gpus):
                assert rank(candidate) >= rank(of) or not choices.fits(peak_memory(candidate))


MEASURED = {
    ("776m+rope", 4096, ""): 0.525,
    ("776m+rope", 32_768, ""): 0.502,
    ("776m+gdn_nope_lh", 4096, ""): 0.499,
    ("776m+gdn_nope_lh", 32_768, ""): 0.477,
    ("776m+gla_nope_lh", 4096, ""): 0.485,
    ("776m+gla_nope_lh", 32_768, ""): 0.479,
    ("776m+swa_nope_lh", 32_768, ""): 0.509,
    ("776m+kda_nope_lh", 4096, ""): 0.406,
    ("776m+mamba2_nope_lh", 4096, ""): 0.492,
    ("776m+rwkv7_nope_lh", 4096, ""): 0.392,
    ("776m+rope", 4096, "parallel.tensor=2 parallel.sequence=true"): 0.820,
    ("776m+rope", 4096, "parallel.pipeline=2 train.batch_tokens=262144"): 0.742,
    ("776m+rope", 32_768, "parallel.context=2"): 0.825,
    ("1b+rope", 32_768, "parallel.context=2"): 0.817,
}
"""On two H200s, or one (benchmarks/README.md): MFU; with a layout of two, the part of one GPU's speed."""


@pytest.mark.parametrize("which", MEASURED, ids=str)
def test_the_expected_speed_is_what_was_measured(which):
    of, context, words = which
    micro_batch = 32_768 // context

    def expected(gpus: int, *more: str) -> float:
        config = recipe(
            f"{of}+pretrain_4k", f"train.context={context}", f"train.micro_batch={micro_batch}", "train.batch_tokens=65536", *more
        )
        return expected_mfu(Layout(config, plan_layers(config), gpus))

    found = expected(2, *words.split()) / expected(1) if words else expected(1)
    assert found == pytest.approx(MEASURED[which], rel=0.05)


def test_the_expected_speed_of_several_mixers_is_by_their_heads():
    nope = "{mixer: attention, position: nope}"
    pattern = f"pattern=[{{mixer: gdn, repeat: 2}}, {{heads: [{{mixer: rwkv7}}, {nope}]}}, {nope}]"
    plan = plan_layers(recipe("776m+rope+pretrain_4k", pattern))
    assert measured_mfu(plan) == pytest.approx(5 / (4 / MEASURED_MFU["gdn"] + 1 / MEASURED_MFU["rwkv7"]))
    assert MEASURED_MFU.keys() == MIXERS.keys()


@pytest.mark.parametrize("words", [[], ["seed=3", "data.train=x"]])
def test_the_run_folder_is_the_one_of_a_training(words):
    folder = recipe("776m+rope+pretrain_4k", *words).run_dir
    assert f"\nrun         {folder}\n" in command("776m+rope+pretrain_4k", *words).out
    assert (folder == "runs/776m+rope+pretrain_4k") == (not words)


def test_a_miniature_takes_little_and_not_nothing():
    out = command("376m+rope+pretrain_4k+tiny", "--gpus", "1").out
    assert "weights 0.0007, gradients 0.0007, optimizer 0.001," in out  # 197,184 parameters of 4, 4 and 8 bytes
    assert " 0.0 GiB" not in out and " 0.00," not in out


def test_a_plan_needs_no_run_to_begin_from():
    assert "suggested" in command("776m+gdn_nope_lh+extend_32k", "--gpus", "8").out


def test_no_suggestion_where_nothing_fits():
    ended = command("3b+rope+pretrain_4k", "model.num_layers=1024", "--gpus", "1")
    assert ended.code == 0 and "nothing: no layout of 1 GPU fits in memory" in ended.out


def test_layouts_are_all_that_are_valid():
    """Of eight GPUs, against validate alone, sequence parallelism with every tensor size."""
    config = recipe("376m+gdn_nope_lh+pretrain_4k", "train.micro_batch=4")
    valid = set()
    for tensor in (1, 2, 4, 8):
        for context in (1, 2, 4, 8):
            for pipeline in (1, 2, 4, 8):
                sizes = replace(config.parallel, tensor=tensor, context=context, pipeline=pipeline, sequence=tensor > 1)
                try:
                    validate(replace(config, parallel=sizes), 8)
                except Exception:
                    continue
                valid.add((tensor, context, pipeline))
    found = make_plan(config, [8])["layouts"]["8"]
    assert {(of["tensor"], of["context"], of["pipeline"]) for of in found} == valid and len(found) == len(valid) > 10


# --- studies ----------------------------------------------------------------------------------------------------------------------------


def test_a_study_has_a_plan_of_each_run():
    found = json.loads(command("--study", "hypenet", "--json", "--mfu", "0.4").out)
    study = load_study("hypenet")
    assert [(run["run"], run["gpus"]) for run in found["runs"]] == [(run.name, run.gpus) for run in study.runs]
    first = numbers(study.runs[0].words[0], *study.runs[0].words[1:], "--gpus", str(study.runs[0].gpus), "--mfu", "0.4")
    same = found["runs"][0]
    assert {key: same[key] for key in first if key not in ("recipe", "run_dir")} == {
        key: value for key, value in first.items() if key not in ("recipe", "run_dir")
    }
    assert found["gpu_hours"] == pytest.approx(sum(run["time"][str(run["gpus"])]["gpu_hours"] for run in found["runs"]))
    lines = command("--study", "hypenet").out.splitlines()
    assert len(lines) == 4 + len(study.runs) and lines[-1].startswith("all")


def test_broken_runs_of_a_study_are_named(monkeypatch):
    good, bad = (Run("made", name, ("376m+rope+pretrain_4k", *more), None, 8, None) for name, more in (("good", ()), ("bad", ("seed=-1",))))
    monkeypatch.setattr("hybrid_megatron.config.studies.load_study", lambda name: Study(name, "", (), (good, bad), (), ()))
    ended = command("--study", "made")
    assert ended.code == 2 and ended.errors == ["study made: 1 of 2 runs break rules: bad"]
    assert "seed=-1: it must be 0 or more" in ended.out and ended.out.splitlines()[-1].startswith("all")
    monkeypatch.undo()
    [said] = command("--study", "made").errors
    assert said.startswith("study 'made' is not known")
