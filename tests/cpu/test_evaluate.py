"""Loss by position and perplexity of a trained run: true numbers, under any layout and setting of inference, and results in files."""

import itertools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data_prep.indexed_dataset import IndexedDataset
from hybrid_megatron.config import EvaluationConfig, load_recipe
from hybrid_megatron.config.schema import InferenceConfig
from hybrid_megatron.data import TokenStream
from hybrid_megatron.errors import DataError
from hybrid_megatron.evaluation.held_out import held_out
from hybrid_megatron.evaluation.loss_by_position import bucket_edges
from hybrid_megatron.evaluation.results import evaluation_name
from tests.cpu.evaluations import drawn_over, evaluate, sums_by_position
from tests.cpu.quick import quick_and_slow
from tests.cpu.reference_model import reference_losses
from tests.cpu.runs import tensors, train
from tests.cpu.tiny import tiny_words

HEADS = (
    "pattern=[{mixer: gdn, position: rope}, {heads: [{mixer: gla, share: 1}, {mixer: attention, position: rope, share: 1}]},"
    "{heads: [{mixer: attention, position: nope, share: 1}, {mixer: lightning, share: 1}]}, {mixer: swa}]"
)
RUNS = {"layers": ["data.document_mask=true"], "heads": [HEADS, "model.swa.window=16", "model.num_kv_heads=4"]}


@pytest.fixture(scope="module")
def runs(ranks, tiny_data, tmp_path_factory) -> dict[str, Path]:
    """Two runs of four steps, at 64 tokens a sample, with checkpoints after steps 2 and 4."""
    folder = tmp_path_factory.mktemp("runs")
    for name, words in RUNS.items():
        more = [f"run_dir={folder / name}", "train.tokens=2048", "checkpoint.interval_steps=2", *words]
        assert train(ranks, 1, tiny_words(tiny_data, *more)).code == 0
    return {name: folder / name for name in RUNS}


@pytest.fixture
def run(runs, tmp_path) -> Path:
    """A copy of the layer-wise run without results, to be changed."""
    shutil.copytree(runs["layers"], tmp_path / "run", ignore=shutil.ignore_patterns("evaluation"))
    return tmp_path / "run"


def numbers(ranks, run: Path, *words: str, size: int = 1) -> dict:
    ended = evaluate(ranks, size, [str(run), "--json", *words])
    assert (ended.code, ended.err) == (0, ""), ended
    return json.loads(ended.out)


def expected_losses(run: Path, length: int, samples: int, step: int = 4) -> torch.Tensor:
    """[samples, length] float64, by the definition of the model, from the stream of held-out tokens."""
    config = load_recipe([str(run / "config.yaml")])
    weights = {name: x.double() for name, x in tensors(run / f"checkpoints/step_{step:08d}").items() if not name.startswith("optimizer.")}
    stream = torch.from_numpy(IndexedDataset(Path(config.data.valid)).tokens[: samples * length + 1].astype(np.int64))
    tokens, targets = stream[:-1].view(samples, length), stream[1:].view(samples, length)
    starts = None
    if config.data.document_mask:
        starts = tokens == 1  # each document begins with this word, and no other token is it
        starts[:, 0] = True
    with torch.no_grad():
        return reference_losses(config, weights, tokens, targets, starts)


@pytest.mark.parametrize("name", RUNS)
def test_numbers_are_those_of_the_definition(ranks, runs, name, tmp_path):
    words = ["lengths=[64,256]", "tokens=1100", f"output={tmp_path}", "micro_batch=2", "name=plain"]
    [found] = ranks.run(1, sums_by_position, runs[name], words)
    report = json.loads((tmp_path / "step_00000004/plain.json").read_text())
    assert found.keys() == {64, 256}
    for (length, (sums, tokens)), line in zip(found.items(), report["lengths"]):
        samples = 1024 // length  # 1,100 rounded down to whole samples of 256: 1,024 tokens at both lengths
        losses = expected_losses(runs[name], length, samples)
        assert tokens.tolist() == [samples] * length
        assert (sums - losses.sum(0)).abs().max() <= 1e-5 * samples
        assert line["loss"] == pytest.approx(float(losses.mean()), abs=1e-6)
        assert line["perplexity"] == pytest.approx(math.exp(float(losses.mean())), rel=1e-6)
        assert (line["length"], line["multiple"], line["samples"], line["tokens"]) == (length, length / 64, samples, 1024)
        edges = line["positions"]["edges"]
        assert edges == bucket_edges(length)
        buckets = [losses[:, begin:end] for begin, end in itertools.pairwise(edges)]
        assert line["positions"]["tokens"] == [bucket.numel() for bucket in buckets]
        assert line["positions"]["loss"] == pytest.approx([float(bucket.mean()) for bucket in buckets], abs=1e-5)


def test_an_earlier_checkpoint(ranks, runs, tmp_path):
    report = numbers(ranks, runs["layers"], "checkpoint=step_00000002", "lengths=[64]", "tokens=128", f"output={tmp_path}", "name=plain")
    assert (report["checkpoint"]["step"], report["checkpoint"]["tokens"]) == (2, 1024)
    assert report["lengths"][0]["loss"] == pytest.approx(float(expected_losses(runs["layers"], 64, 2, step=2).mean()), abs=1e-6)
    assert (tmp_path / "step_00000002/plain.json").is_file()


LAYOUTS = {
    "data 4, more ranks than samples": (4, []),
    "tensor 2, sequence": (2, ["parallel.tensor=2", "parallel.sequence=true"]),
    "context 2": (2, ["parallel.context=2", "parallel.context_linear=all_to_all"]),
    "pipeline 2, virtual 2": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
    "tensor 2, context 2": (4, ["parallel.tensor=2", "parallel.context=2", "parallel.context_attention=gather"]),
    "pipeline 2, data 2": (4, ["parallel.pipeline=2"]),
}
LAYOUTS_MORE = {
    "data 2": (2, []),
    "tensor 2": (2, ["parallel.tensor=2"]),
    "pipeline 2": (2, ["parallel.pipeline=2"]),
}
ALL = ["inference.logit_scale=hype", "inference.logit_scale_value=20", "inference.rope_window=40"]
LONG = ["lengths=[64,256]", "tokens=768"]


@pytest.fixture(scope="module")
def alone(ranks, runs, tmp_path_factory) -> dict[bool, dict]:
    """The head-wise run on one process, with and without windows of linear mixers."""
    output = tmp_path_factory.mktemp("alone")
    return {
        swla: numbers(ranks, runs["heads"], *ALL, *LONG, f"output={output}", *(["inference.swla_window=32"] if swla else []))
        for swla in (False, True)
    }


@pytest.mark.parametrize("layout", quick_and_slow(LAYOUTS, LAYOUTS_MORE))
def test_every_layout_measures_the_same(ranks, runs, alone, layout, tmp_path):
    """Scales by position and windows included: what a rank computes depends on where its tokens are. Three samples of 256."""
    size, words = (LAYOUTS | LAYOUTS_MORE)[layout]
    swla = "tensor 2, context 2" not in layout  # a window needs whole samples, and this layout has too few heads for them
    more = ["inference.swla_window=32"] if swla else []
    found = numbers(ranks, runs["heads"], *ALL, *LONG, *words, *more, f"output={tmp_path}", size=size)
    for mine, whole in zip(found["lengths"], alone[swla]["lengths"]):
        assert abs(mine["loss"] - whole["loss"]) <= 1e-6
        assert mine["positions"]["loss"] == pytest.approx(whole["positions"]["loss"], abs=5e-6)
        for key in ("length", "samples", "tokens"):
            assert mine[key] == whole[key]
        assert mine["positions"]["tokens"] == whole["positions"]["tokens"]
    assert found["device"]["processes"] == size
    assert alone[True]["lengths"][1]["loss"] != alone[False]["lengths"][1]["loss"]


@pytest.mark.parametrize("size, words", [(2, []), (2, ["parallel.context=2"]), (2, ["parallel.pipeline=2"])])
def test_every_layout_sees_the_same_documents(ranks, runs, size, words, tmp_path):
    """The layer-wise run was trained with documents masked."""
    one, found = (
        numbers(ranks, runs["layers"], *LONG, *own, f"output={tmp_path / str(count)}", size=count)
        for own, count in (([], 1), (words, size))
    )
    for mine, whole in zip(found["lengths"], one["lengths"]):
        assert abs(mine["loss"] - whole["loss"]) <= 1e-6
        assert mine["positions"]["loss"] == pytest.approx(whole["positions"]["loss"], abs=5e-6)


SETTINGS = [
    ["inference.logit_scale=log"],
    ["inference.logit_scale=constant", "inference.logit_scale_value=1.5"],
    ["inference.dynamic_ntk=true"],
    ["inference.swla_window=32"],
]


@pytest.mark.parametrize("words", SETTINGS, ids=lambda words: words[0])
@pytest.mark.parametrize("name", RUNS)
def test_settings_change_what_they_should(ranks, runs, name, words, tmp_path):
    """log and NTK act beyond the training length alone."""
    more = ["lengths=[64,256]", "tokens=256", f"output={tmp_path}"]
    plain, changed = (numbers(ranks, runs[name], *more, *own)["lengths"] for own in ([], words))
    assert (changed[0]["loss"] == plain[0]["loss"]) == (words[0] in ("inference.logit_scale=log", "inference.dynamic_ntk=true"))
    assert changed[1]["loss"] != plain[1]["loss"]


def test_rope_window_is_a_run_of_swa(ranks, run, tmp_path):
    """The same parameters under a recipe that says swa where it said attention with RoPE."""
    windowed = numbers(ranks, run, "inference.rope_window=32", "lengths=[256]", "tokens=512", f"output={tmp_path}")
    config = (run / "config.yaml").read_text()
    assert config.count("mixer: attention\n  position: rope") == 1
    (run / "config.yaml").write_text(
        config.replace("mixer: attention\n  position: rope", "mixer: swa\n  position: rope").replace("window: 128", "window: 32")
    )
    swa = numbers(ranks, run, "lengths=[256]", "tokens=512", f"output={tmp_path / 'swa'}")
    assert windowed["lengths"] == swa["lengths"]


def test_the_longest_lengths_and_precision(ranks, runs, tmp_path):
    """1, 2, 4, 8 and 16 times the training length unless others are asked for; bf16 of a run in float32."""
    report = numbers(ranks, runs["heads"], "precision=bf16", f"output={tmp_path}")
    held = len(IndexedDataset(Path(report["data"]["prefix"])).tokens)
    assert [line["multiple"] for line in report["lengths"]] == [1, 2, 4, 8, 16]
    assert {line["tokens"] for line in report["lengths"]} == {(held - 1) // 1024 * 1024}
    assert report["name"] == "precision=bf16"
    exact, [*_, longest] = expected_losses(runs["heads"], 1024, 1)[0], report["lengths"]
    assert abs(longest["loss"] - float(exact.mean())) < 0.02
    positions = longest["positions"]
    of_buckets = [float(exact[begin:end].mean()) for begin, end in itertools.pairwise(positions["edges"])]
    assert 1e-4 < max(abs(mine - other) for mine, other in zip(positions["loss"], of_buckets)) < 0.1, "rounded, unlike in float32"


def test_whole_documents(ranks, runs, tiny_data, tmp_path):
    """Only documents of the longest length and one more; each sample begins where its document does."""
    documents = IndexedDataset(tiny_data / "valid")
    fitting = [documents[i].astype(np.int64) for i in range(len(documents)) if documents.lengths[i] > 40]
    report = numbers(ranks, runs["heads"], "whole_documents=true", "lengths=[16,40]", f"output={tmp_path}")
    assert [line["samples"] for line in report["lengths"]] == [len(fitting)] * 2 and len(fitting) > 3
    config = load_recipe([str(runs["heads"] / "config.yaml")])
    weights = {n: x.double() for n, x in tensors(runs["heads"] / "checkpoints/step_00000004").items() if not n.startswith("optimizer.")}
    tokens = torch.from_numpy(np.stack([document[:41] for document in fitting]))
    with torch.no_grad():
        losses = reference_losses(config, weights, tokens[:, :-1], tokens[:, 1:])
    assert report["lengths"][1]["loss"] == pytest.approx(float(losses.mean()), abs=1e-6)
    assert report["lengths"][0]["loss"] == pytest.approx(float(losses[:, :16].mean()), abs=1e-6), "the beginnings of the same ones"


def stream_of(*lengths: int) -> TokenStream:
    return TokenStream("data=made", Path("made"), np.arange(sum(lengths)), np.concatenate(([0], np.cumsum(lengths))), "0", sum(lengths))


def test_samples():
    stream = stream_of(10, 30, 0, 25)
    whole = held_out(stream, 16, 1000, False, False)
    assert (whole.samples(16), whole.samples(8), whole.samples(12)) == (4, 8, 5), "64 of 65 tokens, the last one being a target alone"
    assert [whole.begin(i, 8) for i in range(3)] == [0, 8, 16]
    assert held_out(stream, 16, 40, False, False).samples(8) == 4, "40 tokens, rounded down to samples of 16"
    assert held_out(stream, 16, 3, False, False).samples(8) == 2, "one at least"
    books = held_out(stream, 24, 1000, True, False)
    assert [books.begin(i, 8) for i in range(books.samples(8))] == [10, 40], "of 25 tokens or more"
    assert held_out(stream, 29, 1000, True, False).samples(4) == 1
    with pytest.raises(DataError, match="it holds 65 tokens, fewer than the 66 of one sample .* the longest possible is 64"):
        held_out(stream, 65, 1000, False, False)
    with pytest.raises(DataError, match="its longest document holds 30 tokens, fewer than the 31 of one sample .* possible is 29"):
        held_out(stream, 30, 1000, True, False)


def test_document_starts():
    data = held_out(stream_of(10, 30, 0, 25), 16, 1000, False, True)
    assert np.flatnonzero(data._starts(0, 16)).tolist() == [0, 10]
    assert np.flatnonzero(data._starts(16, 16)).tolist() == [0]
    assert np.flatnonzero(data._starts(40, 16)).tolist() == [0], "at a border, and an empty document there"
    assert np.flatnonzero(data._starts(25, 16)).tolist() == [0, 15]


def test_ids_that_are_no_words():
    alone = SimpleNamespace(data=1, data_rank=0, micro_batch_group=1, context=1, context_rank=0)
    data = held_out(replace(stream_of(100), words=50), 16, 1000, False, False)
    read = data.batches(16, 1, alone)
    assert [int(next(read).targets.max()) for _ in range(3)] == [16, 32, 48]
    with pytest.raises(DataError, match="data=made: it holds the token 64, and the words of model.vocab_size=50 are 0 to 49"):
        next(read)


@pytest.mark.parametrize("length", [1, 5, 16, 17, 64, 100, 65_536])
def test_buckets(length):
    edges = bucket_edges(length)
    assert edges[0] == 0 and edges[-1] == length
    for begin, end in itertools.pairwise(edges):
        assert 1 <= end - begin <= max(1, begin / 8)
    assert length not in (64, 65_536) or {1, 2, 16, length // 4, length // 2} <= set(edges), "powers of two are edges"


def test_name():
    def name(**settings) -> str:
        return evaluation_name(EvaluationConfig(**settings))

    assert name(micro_batch=2, output="x") == "plain"
    assert name(lengths=[64, 256], tokens=512) == "lengths=64-256,tokens=512"
    inference = InferenceConfig(logit_scale="hype", logit_scale_value=300.0, dynamic_ntk=True, swla_window=4096)
    assert name(inference=inference) == "logit_scale=hype,logit_scale_value=300,dynamic_ntk=true,swla_window=4096"
    assert name(data="/books/pg19", whole_documents=True, precision="bf16") == "data=pg19,whole_documents=true,precision=bf16"


def test_results(ranks, run):
    """What is printed and written: a table or JSON, one file of numbers and one picture, nothing else."""
    before = {path.relative_to(run) for path in run.rglob("*")}
    ended = evaluate(ranks, 1, [str(run), "lengths=[128,64]", "tokens=512", "name=plain"])
    assert (ended.code, ended.err) == (0, "")
    folder = run / "evaluation/step_00000004"
    report = json.loads((folder / "plain.json").read_text())
    rows = [line.split() for line in ended.out.splitlines() if line[:10].strip().isdigit()]
    assert [row[:4] for row in rows] == [["64", "1", "8", "512"], ["128", "2", "4", "512"]]
    for row, line in zip(rows, report["lengths"]):
        assert float(row[4]) == pytest.approx(line["loss"], abs=1e-4) and float(row[5]) == pytest.approx(line["perplexity"], abs=1e-3)
    assert "\ntokens     " not in ended.out, "as many as were asked for"
    assert f"written    {folder / 'plain.json'}" in ended.out and "step_00000004 (2,048 tokens)" in ended.out
    new = {path.relative_to(run) for path in run.rglob("*")} - before
    assert {str(path) for path in new} == {"evaluation", *(f"evaluation/step_00000004{f}" for f in ("", "/plain.json", "/plain.png"))}
    assert (folder / "plain.png").read_bytes().startswith(b"\x89PNG")

    config = load_recipe([str(run / "config.yaml")])
    assert report.keys() == {"name", "run", "checkpoint", "data", "settings", "device", "date", "lengths"}
    assert report["name"] == "plain"
    assert report["run"] == {
        "name": config.name,
        "folder": str(run),
        "trained_context": 64,
        "layers": "gdn x1, attention (rope) x1, gdn x1, attention (nope) x1",
        "document_mask": True,
    }
    assert report["settings"]["lengths"] == [64, 128] and report["settings"]["inference"]["logit_scale"] == "none"
    assert report["data"]["prefix"] == config.data.valid and report["data"]["whole_documents"] is False
    assert report["device"]["name"] == "CPU" and report["device"]["layout"]["tensor"] == 1
    assert report["lengths"][0].keys() == {"length", "multiple", "samples", "tokens", "loss", "perplexity", "positions"}

    again = evaluate(ranks, 1, [str(run), "lengths=[128,64]", "tokens=512", "name=plain", "--json"])
    assert again.out == (folder / "plain.json").read_text(), "nothing but what is written"
    assert json.loads(again.out)["lengths"] == report["lengths"]


def test_others_in_the_picture(ranks, run):
    """Evaluations of the same parameters and tokens, and no others."""

    def others(*words: str) -> list[str]:
        return [each["name"] for each in ranks.run(1, drawn_over, [str(run), *words])[0]]

    few = ["lengths=[64,128]", "tokens=256"]
    usual = "lengths=64-128,tokens=256"
    assert others(*few) == []
    assert others(*few, "inference.logit_scale=log", "name=log") == [usual]
    assert others("lengths=[64]", "tokens=512", "name=more") == [], "more tokens"
    assert others("lengths=[64]", "tokens=256", "name=fewer") == [usual, "log"]
    assert others(*few, "checkpoint=step_00000002") == []
    assert others(*few, f"data={load_recipe([str(run / 'config.yaml')]).data.train}") == []
    (run / "evaluation/step_00000004/notes.json").write_text("{}")
    assert others(*few) == ["fewer", "log"]
    ended = evaluate(ranks, 1, [str(run), *few])
    assert ended.code == 0
    assert ended.err == f"warning: {run / 'evaluation/step_00000004/notes.json'}: it holds no evaluation, so it is not in the plot\n"


def refused(ranks, words: list[str], size: int = 1) -> str:
    ended = evaluate(ranks, size, words)
    assert ended.code == 2 and ended.out == ""
    [said] = ended.errors
    return said


# words after the run folder, processes, what is said
REFUSED = {
    "window without effect": (
        ["lengths=[64,128]", "inference.rope_window=128"],
        1,
        "rope_window=128: no length is above it, the longest is 128",
    ),
    "windows without effect": (["lengths=[128]", "inference.swla_window=256"], 1, "swla_window=256: no length is above it"),
    "log without effect": (["lengths=[64]", "inference.logit_scale=log"], 1, "logit_scale=log: it acts beyond the 64 tokens of training"),
    "ntk without effect": (
        ["lengths=[32,64]", "inference.dynamic_ntk=true"],
        1,
        "dynamic_ntk=true: it acts beyond the 64 tokens of training",
    ),
    "unknown key": (["length=[64]"], 1, "override length=[64]: length is not a setting; did you mean lengths?"),
    "unknown inference": (["inference.logit_scal=log"], 1, "inference.logit_scal is not a setting; did you mean inference.logit_scale?"),
    "wrong type": (["tokens=1e6"], 1, "tokens=1000000.0: this must be a whole number"),
    "a setting of training": (["model.num_heads=3"], 1, "model is not a setting; settings are checkpoint, data, lengths, tokens, "),
    "a key of data": (["data.train=x"], 1, "override data.train=x: data must be a text, with no train below it"),
    "no value": (["tokens"], 1, "override 'tokens' is not of the form section.key=value"),
    "checkpoint": (["checkpoint=step_00000003"], 1, "has no such checkpoint; it has step_00000002, step_00000004"),
    "a step that is none": (["checkpoint='3'"], 1, "checkpoint=3: "),
    "an option": (["--foo"], 1, "there is no option --foo here; --help says what there is"),
    "checkpoint elsewhere": (["checkpoint=../checkpoints/step_00000004"], 1, "has no such checkpoint"),
    "length": (
        ["lengths=[64,4096]"],
        1,
        "fewer than the 4,097 of one sample at the longest of the lengths, 4096; the longest possible is ",
    ),
    "document": (["whole_documents=true"], 1, "its longest document holds "),
    "no lengths": (["lengths=[]"], 1, "lengths=[]: it must name one length or more"),
    "length 0": (["lengths=[0,64]"], 1, "lengths=[0, 64]: it must name one length or more, each at least 1 token"),
    "tokens": (["tokens=0"], 1, "tokens=0: it must be more than 0"),
    "precision": (["precision=fp16"], 1, "precision=fp16: it must be one of bf16, fp32"),
    "name": (["name=a/b"], 1, "name=a/b: it names files"),
    "data": (["data=nowhere/valid"], 1, "data=nowhere/valid: nowhere/valid.bin does not exist"),
    "acts on nothing": (["inference.swla_stride=4"], 1, "inference.swla_stride=4: it is the stride of swla_window, which is not set"),
    "scale": (["inference.logit_scale=square"], 1, "inference.logit_scale=square: it must be one of none, log, hype, constant"),
    "tensor": (["parallel.tensor=3"], 3, None),
    "context": (["parallel.context=2", "lengths=[64,66]"], 2, "must be a multiple of 4, and 66 of lengths=[64, 66] is not"),
    "sequence": (["parallel.sequence=true"], 1, "parallel.sequence=true: it splits over the tensor ranks and parallel.tensor=1"),
    "pipeline": (["parallel.pipeline=3"], 3, "parallel.pipeline=3: it must divide model.num_layers=4"),
    "processes": (["parallel.tensor=2"], 1, "tensor * context * pipeline = 2 * 1 * 1 = 2 must divide the 1 process of this run"),
    "windows over ranks": (["parallel.context=2", "inference.swla_window=64"], 2, "it needs whole sequences on a rank"),
    "exchange": (["parallel.context_linear=ring"], 1, "parallel.context_linear=ring: it must be one of states, all_to_all"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(ranks, run, case):
    words, size, sentence = REFUSED[case]
    ended = evaluate(ranks, size, [str(run), *words])
    assert ended.code == 2 and ended.out == ""
    if sentence is None:  # every part that cannot be split says so
        assert len(ended.errors) > 1 and all(line.startswith("parallel.tensor=3: ") for line in ended.errors)
    else:
        assert sentence in ended.err and len(ended.errors) == 1, ended.err
    assert not (run / "evaluation").exists()


def test_run_folders_that_are_none(ranks, run, tmp_path):
    assert refused(ranks, [str(tmp_path / "nowhere")]).startswith(
        f"{tmp_path / 'nowhere'}: there is no such folder; give the folder of a run"
    )
    assert refused(ranks, [str(tmp_path)]).startswith(f"{tmp_path}: it has no config.yaml; give the folder of a run")
    assert refused(ranks, ["inference.logit_scale=log"]).startswith("no run folder given")
    shutil.rmtree(run / "checkpoints")
    assert refused(ranks, [str(run)], size=2) == f"{run}: it has no complete checkpoint yet; train on until its first one"


def test_run_without_held_out_data(ranks, run):
    config = (run / "config.yaml").read_text()
    [line] = [line for line in config.splitlines() if line.startswith("  valid: ")]
    (run / "config.yaml").write_text(config.replace(line, "  valid: null"))
    assert refused(ranks, [str(run)]) == "data is not set, and the run has no data.valid: give held-out tokens with data=PREFIX"
    report = numbers(ranks, run, "lengths=[64]", "tokens=64", f"data={line.split()[1]}")
    assert report["name"] == "data=valid,lengths=64,tokens=64"


def test_damaged_checkpoint(ranks, run):
    [file] = (run / "checkpoints/step_00000004").glob("__0_0.distcp")
    content = bytearray(file.read_bytes())
    content[500] ^= 1
    file.write_bytes(content)
    said = refused(ranks, [str(run), "lengths=[64]"], size=2)
    assert "__0_0.distcp: damaged" in said and said.endswith("; give another with checkpoint=, of step_00000002")


def test_tokens_that_are_rounded_are_told(ranks, run):
    ended = evaluate(ranks, 1, [str(run), "lengths=[64,128]", "tokens=300"])
    assert "\ntokens     256 for tokens=300: whole samples of 128, and no more than the data holds\n" in ended.out


def test_results_that_cannot_be_written(ranks, run):
    (run / "evaluation").write_text("a file")
    assert refused(ranks, [str(run), "lengths=[64]"], size=2).startswith(
        f"output={run / 'evaluation'}: cannot write there (Not a directory)"
    )


def test_loss_that_is_no_number(ranks, run):
    """The first position at which it is not."""
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("norm_eps: 1.0e-05", "norm_eps: -1.0"))
    ended = evaluate(ranks, 1, [str(run), "lengths=[64]", "tokens=64"])
    assert ended.code == 2 and len(ended.errors) == 1
    assert ended.errors[0].startswith("lengths: the loss at 64 tokens cannot be used, from position 0 on it is not a number")


def test_help(ranks):
    ended = evaluate(ranks, 1, ["--help"])
    assert ended.code == 0 and ended.out.startswith("python -m launch evaluate RUN_DIR")
    assert evaluate(ranks, 1, []).code == 2
