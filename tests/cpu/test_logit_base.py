"""choose-logit-base: an evaluation for each candidate, the lowest loss, files; what it refuses."""

import json
from pathlib import Path

import pytest

from hybrid_megatron.config.load import save_config
from tests.cpu.evaluations import choose_command, evaluate
from tests.cpu.runs import Ended, train
from tests.cpu.tiny import tiny_config, tiny_words

WORDS = ["lengths=[64,256]", "tokens=512"]


def choose(ranks, words: list[str], size: int = 1) -> Ended:
    """The command on `size` ranks, of which rank 0 alone speaks."""
    ended = ranks.run(size, choose_command, words)
    assert len({each.code for each in ended}) == 1 and not any(each.out or each.err for each in ended[1:]), ended
    return ended[0]


@pytest.fixture(scope="module")
def run(ranks, tiny_data, tmp_path_factory) -> Path:
    """A run of twenty steps at 64 tokens a sample."""
    folder = tmp_path_factory.mktemp("logit_base") / "run"
    assert train(ranks, 1, tiny_words(tiny_data, f"run_dir={folder}")).code == 0
    return folder


def test_the_lowest_loss_wins(ranks, run, tmp_path):
    ended = choose(ranks, [str(run), "--json", "candidates=[300,2,50,50]", f"output={tmp_path}", *WORDS])
    assert ended.code == 0, ended
    choice = json.loads(ended.out)
    assert [line["base"] for line in choice["losses"]] == [2, 50, 300], "in order, each once"
    losses = {line["base"]: line["loss"] for line in choice["losses"]}
    assert choice["best"] == min(losses, key=losses.get)
    assert (choice["checkpoint"], choice["length"], choice["tokens"]) == ("step_00000020", 256, 512)
    assert json.loads((tmp_path / "logit_base.step_00000020.json").read_text()) == choice
    for base, loss in {None: choice["unscaled_loss"], **losses}.items():
        scale = [] if base is None else ["inference.logit_scale=hype", f"inference.logit_scale_value={base}"]
        alone = json.loads(evaluate(ranks, 1, [str(run), "--json", "lengths=[256]", "tokens=512", f"output={tmp_path / 'x'}", *scale]).out)
        assert alone["lengths"][0]["loss"] == loss, "as an evaluation with this setting says"
    assert len({*losses.values(), choice["unscaled_loss"]}) == 4, "the scales do something"


def test_as_a_table_on_two_ranks(ranks, run, tmp_path):
    one = json.loads(choose(ranks, [str(run), "--json", "candidates=[20,300]", f"output={tmp_path / '1'}", *WORDS]).out)
    ended = choose(ranks, [str(run), "candidates=[20,300]", f"output={tmp_path / '2'}", "parallel.context=2", *WORDS], size=2)
    two = json.loads((tmp_path / "2/logit_base.step_00000020.json").read_text())
    assert two["best"] == one["best"] and two["unscaled_loss"] == pytest.approx(one["unscaled_loss"], abs=1e-5)
    lines = ended.out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == ["base", "none", "20", "300"]
    assert f"best       {one['best']:g}: loss" in ended.out
    assert "is the least of them" in ended.err or "is the largest of them" in ended.err, "one of two candidates is at the border"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["candidates=[300,1]"], "candidates=[300, 1]: it must name one base or more, each more than 1"),
        (["candidates=[]"], "candidates=[]: it must name one base or more"),
        (["candidate=[3]"], "candidate is not a setting; did you mean candidates?"),
        (["inference.logit_scale=log"], "inference.logit_scale=log: the candidates are the scales tried"),
        (["inference.logit_scale_value=3"], "leave it out, and its value"),
        (["lengths=[]"], "lengths=[]: it must name one length or more"),
    ],
)
def test_refused(ranks, run, words, sentence):
    ended = choose(ranks, [str(run), *words])
    assert ended.code == 2 and sentence in ended.errors[0] and len(ended.errors) == 1


def test_no_run_folder(ranks, tmp_path):
    assert "no run folder given" in choose(ranks, ["candidates=[3]"]).errors[0]
    assert "there is no such folder" in choose(ranks, [str(tmp_path / "none")]).errors[0]


def test_a_model_without_such_attention_is_refused(ranks, tiny_data, tmp_path):
    save_config(tiny_config(tiny_data, f"run_dir={tmp_path}", "pattern=[{mixer: attention, position: rope}]"), tmp_path / "config.yaml")
    [ended] = ranks.run(1, choose_command, [str(tmp_path)])
    assert ended.code == 2 and ended.errors[0].startswith(f"{tmp_path}: it has no attention without position")
