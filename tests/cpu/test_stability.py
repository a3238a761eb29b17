"""Spikes, NaN and data to leave out: what is found, what is done about it, and that a resumed run decides alike."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from hybrid_megatron.config.validate import validate
from hybrid_megatron.errors import ConfigError
from hybrid_megatron.training.stability import Memory, RecentValues, Stability, recall
from tests.cpu.runs import checkpoints, computed, contents, differing, equal, tensors, train
from tests.cpu.stability_cells import judged_on_uneven_ranks, train_disturbed, without_steps
from tests.cpu.tiny import tiny_config, tiny_words

INF, NAN = math.inf, math.nan
STEPS = 12
WATCHED = ["stability.window=8", f"train.tokens={512 * STEPS}", "validation.interval_steps=100", "checkpoint.interval_steps=100"]


def words(tiny_data: Path, run: Path, *more: str) -> list[str]:
    return tiny_words(tiny_data, f"run_dir={run}", *WATCHED, *more)


def stability(tiny_data: Path, *more: str) -> Stability:
    return Stability(tiny_config(tiny_data, "run_dir=unused", *WATCHED, *more))


def events(run: Path, *kinds: str) -> list[dict]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines if line["event"] in kinds]


def marked(run: Path, name: str = "skipped") -> list[int]:
    """Steps whose line of metrics.jsonl has this mark."""
    lines = computed(run)
    assert all(line[name] == 1 for line in lines if name in line)
    return [line["step"] for line in lines if name in line]


def check_same(a: Path, b: Path, step: int = STEPS) -> None:
    """Bitwise: every metric that no clock measures, parameters, optimizer state."""
    assert computed(a) == computed(b)
    one, other = (contents(run / f"checkpoints/step_{step:08d}") for run in (a, b))
    assert one.keys() == other.keys() and not [key for key in one if not equal(one[key], other[key])]


@pytest.mark.parametrize("window, count", [(8, 4), (8, 8), (8, 30), (128, 64), (128, 500), (9, 4)])
def test_bound_is_mean_and_standard_deviations_of_the_window(window, count):
    values = np.random.default_rng(0).normal(3.0, 0.2, count)
    watch = RecentValues(window, 6.0)
    for i, value in enumerate(values):
        kept = values[:i][-window:]
        if len(kept) < window // 2:
            assert watch.bound == INF
        else:
            assert watch.bound == pytest.approx(kept.mean() + 6 * kept.std(ddof=1), rel=1e-12)
        watch.values.append(float(value))
    assert list(watch.values) == values[-window:].tolist()


USUAL = [3.0, 3.1, 2.9, 3.0, 3.05, 2.95]


def judged(decider: Stability, losses: list[float], norms: list[float] | None = None) -> list:
    return [decider.judge(loss, norm) for loss, norm in zip(losses, norms or [1.0 + 0.01 * loss for loss in losses])]


def test_only_what_rises_is_a_spike(tiny_data):
    assert all(decision.update and not decision.findings for decision in judged(stability(tiny_data), [*USUAL, 0.1, -50.0]))


@pytest.mark.parametrize("policy, update", [("warn", True), ("skip", False), ("stop", False)])
@pytest.mark.parametrize("kind", ["loss_spike", "grad_norm_spike"])
def test_policies(tiny_data, kind, policy, update):
    """A spike in one of the two, which has this policy, while the other is as ever."""
    other = "loss_spike" if kind == "grad_norm_spike" else "grad_norm_spike"
    decider = stability(tiny_data, f"stability.{kind}={policy}", f"stability.{other}=stop")
    spike, usual = [*USUAL, 9.0], [*USUAL, 3.0]
    *before, last = judged(decider, spike, usual) if kind == "loss_spike" else judged(decider, usual, spike)
    assert all(decision.update and not decision.metrics for decision in before)
    bound = np.mean(USUAL) + 6 * np.std(USUAL, ddof=1)
    [finding] = last.findings
    assert (finding.kind, finding.action, last.update) == (kind, policy, update)
    assert finding.facts == {kind.removesuffix("_spike"): 9.0, "bound": pytest.approx(bound, rel=1e-12)}
    assert last.metrics == {kind: 1} | ({} if update else {"skipped": 1})
    assert (last.stop is not None) == (policy == "stop")
    assert f"is 9.0000, above {bound:.4f}, the mean of the last 6 steps and 6 of their standard deviations" in finding.sentence


def test_ignoring_looks_at_nothing(tiny_data):
    decider = stability(tiny_data, "stability.loss_spike=ignore", "stability.grad_norm_spike=ignore")
    assert all(decision.update and not decision.findings for decision in judged(decider, [*USUAL, 1e6], [*USUAL, 1e6]))


def test_of_two_findings_the_harder_policy_counts(tiny_data):
    decider = stability(tiny_data, "stability.loss_spike=warn", "stability.grad_norm_spike=skip")
    last = judged(decider, [*USUAL, 9.0], [*USUAL, 9.0])[-1]
    assert not last.update and last.metrics == {"loss_spike": 1, "grad_norm_spike": 1, "skipped": 1} and last.stop is None


def test_a_level_that_has_changed_is_taken_for_the_usual_one(tiny_data):
    """Skipped steps are remembered too, or everything would be skipped for ever."""
    decider = stability(tiny_data, "stability.loss_spike=skip")
    decisions = judged(decider, [*USUAL, *[6.0] * 6])[len(USUAL) :]
    updates = [decision.update for decision in decisions]
    assert not updates[0] and updates[-1] and updates == sorted(updates)


@pytest.mark.parametrize("loss, norm, said", [(NAN, 1.0, "the loss is nan"), (3.0, INF, "the gradient norm is inf at a loss of 3.0000")])
def test_non_finite(tiny_data, loss, norm, said):
    [decision] = judged(stability(tiny_data), [loss], [norm])
    assert decision.stop == said and not decision.update
    decider = stability(tiny_data, "stability.non_finite=skip", "stability.max_skipped=2")
    decisions = judged(decider, [loss, loss, 3.0, loss, loss, loss], [norm, norm, 1.0, norm, norm, norm])
    assert [decision.update for decision in decisions] == [False, False, True, False, False, False]
    assert [decision.stop is not None for decision in decisions] == [False] * 5 + [True], "two are allowed, one after the other"
    assert decisions[-1].stop == f"{said}, and the 2 steps before it were skipped (stability.max_skipped)"
    assert decisions[-1].findings[0].action == "stop"
    assert list(decider.loss.values) == [3.0], "what is no number is not remembered"
    json.dumps(decision.findings[0].facts, allow_nan=False)


def test_memory_is_what_the_lines_say(tiny_data):
    config = tiny_config(tiny_data, "run_dir=unused", *WATCHED, "stability.skip_steps=[[5, 6]]")

    def line(step: int, **more) -> dict:
        return {"step": step, "loss": 3.0 + step, "grad_norm": 1.0 + step} | more

    def values(*steps: int) -> tuple:
        return tuple((3.0 + step, 1.0 + step) for step in steps)

    lines = [line(1), line(2), {"step": 3, "skipped": 1}, line(4, skipped=1), {"step": 5, "skipped": 1}, {"step": 6, "skipped": 1}]
    lines += [line(step) for step in range(7, 13)]
    assert recall(config, lines, 0) == Memory()
    assert recall(config, lines, 4) == Memory(values(1, 2, 4), skipped=2)
    assert recall(config, lines, 6) == Memory(values(1, 2, 4), skipped=2), "steps left out by their number do not count"
    assert recall(config, lines, 7) == Memory(values(1, 2, 4, 7), skipped=0)
    assert recall(config, lines, 12) == Memory(values(2, 4, 7, 8, 9, 10, 11, 12))
    assert recall(config, lines, 13) == Memory(complete=False), "a line that is not there"
    assert recall(config, lines[:2] + lines[3:], 4) == Memory(values(4), skipped=1, complete=False)
    assert recall(config, [line(step) for step in range(30, 41)], 40) == Memory(values(*range(33, 41))), "all that is looked at is there"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [["parallel.tensor=2"], ["parallel.tensor=2", "parallel.pipeline=2"]])
def test_all_ranks_judge_the_same_numbers(ranks, tiny_data, layout):
    """To the bit, though each of them has computed something slightly different."""
    judged = ranks.run(4, judged_on_uneven_ranks, words(tiny_data, Path("unused"), *layout))
    assert len(set(judged)) == 1 and all(map(math.isfinite, judged[0]))


def test_skipping_a_spike_is_leaving_out_its_batch(ranks, tiny_data, tmp_path):
    """Both the loss and the gradients are a hundred times what they should be; nothing of them stays."""
    run, other = tmp_path / "run", tmp_path / "other"
    assert train(ranks, 2, words(tiny_data, other, "stability.skip_steps=[[8, 8]]")).code == 0
    ended = train_disturbed(ranks, 2, words(tiny_data, run, "stability.loss_spike=skip"), {8: 100.0})
    assert ended.code == 0 and not ended.err
    assert marked(run) == marked(run, "loss_spike") == marked(run, "grad_norm_spike") == [8]
    [spike], [norm] = events(run, "loss_spike"), events(run, "grad_norm_spike")
    history = [line["loss"] for line in computed(run)[:7]]
    assert spike == {
        "event": "loss_spike", "step": 8, "action": "skip", "loss": computed(run)[7]["loss"],
        "bound": pytest.approx(np.mean(history) + 6 * np.std(history, ddof=1), rel=1e-12),
    }  # fmt: skip
    assert norm["action"] == "warn" and norm["grad_norm"] == computed(run)[7]["grad_norm"] > norm["bound"]
    [said, also] = [line for line in ended.out.splitlines() if line.startswith("stability ")]
    assert said.startswith(f"stability  step 8: the loss is {spike['loss']:.4f}, above {spike['bound']:.4f}") and said.endswith(
        "no update is made"
    )
    assert "the gradient norm is" in also
    assert "1 step skipped" in ended.out
    final, expected = (tensors(each / f"checkpoints/step_{STEPS:08d}") for each in (run, other))
    assert differing(final, expected) == []
    for mine, theirs in zip(computed(run), computed(other), strict=True):
        assert mine["step"] == 8 or mine == theirs


def test_a_batch_left_out_is_one_that_never_was(ranks, tiny_data, tmp_path):
    """Against a loop of the test's own; the schedule and the data go on by the number of the step."""
    run = tmp_path / "run"
    left = words(tiny_data, run, "stability.skip_steps=[[1, 2], [6, 8], [8, 9], [12, 12]]", "train.precision=bf16")
    ended = train(ranks, 2, left)
    assert ended.code == 0 and not ended.err
    expected = ranks.run(2, without_steps, left, [1, 2, 6, 7, 8, 9, 12])[0]
    lines = computed(run)
    assert [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line] == expected
    assert marked(run) == [1, 2, 6, 7, 8, 9, 12]
    assert all(line.keys() <= {"step", "tokens", "lr", "skipped", "validation_loss"} for line in lines if "skipped" in line)
    assert [line["tokens"] for line in lines] == [512 * step for step in range(1, STEPS + 1)]
    assert [(event["first"], event["last"], event["step"]) for event in events(run, "skip_steps")] == [(1, 2, 1), (6, 9, 6), (12, 12, 12)]
    assert "stability.skip_steps leaves out the batches of steps 6 to 9" in ended.out and "7 steps skipped" in ended.out
    assert "validation_loss" in lines[-1], "validation and checkpoints go on"
    assert checkpoints(run) == [f"step_{STEPS:08d}"]
    assert (run / "loss.png").is_file()


@pytest.mark.slow
def test_stop_keeps_the_parameters_from_before(ranks, tiny_data, tmp_path):
    run, until = tmp_path / "run", tmp_path / "until"
    stops = words(tiny_data, run, "stability.grad_norm_spike=stop", "stability.loss_spike=ignore", "checkpoint.interval_steps=5")
    ended = train_disturbed(ranks, 2, stops, {}, {8: 100.0})
    assert ended.code == 2
    [said] = ended.errors
    assert said.startswith("step 8: the gradient norm is ") and "; the run stops. The parameters after 7 steps are in " in said
    assert "the newest good checkpoint is step_00000005" in said and said.endswith(
        "[8, 8] added to stability.skip_steps leaves this batch out"
    )
    assert checkpoints(run) == ["diverged_00000007", "step_00000005"] and len(computed(run)) == 7
    assert [event["action"] for event in events(run, "grad_norm_spike")] == ["stop"]
    plain = words(tiny_data, until, "checkpoint.interval_steps=7", "stability.loss_spike=ignore")
    assert train(ranks, 2, plain, stop=(7, 0, "SIGINT")).code == 130  # which leaves a permanent checkpoint, as a run that stops itself
    assert differing(tensors(run / "checkpoints/diverged_00000007"), tensors(until / "checkpoints/step_00000007")) == []
    ended = train_disturbed(ranks, 2, [*stops, "stability.skip_steps=[[8, 8]]"], {}, {8: 100.0})
    assert ended.code == 0 and marked(run) == [8], "what the message advises"


@pytest.mark.slow
def test_infinite_losses_are_skipped_so_many_times(ranks, tiny_data, tmp_path):
    """Their gradients are NaN too, and do not come back in a later step."""
    run, other = tmp_path / "run", tmp_path / "other"
    skips = ["stability.non_finite=skip", "stability.max_skipped=2"]
    ended = train_disturbed(ranks, 2, words(tiny_data, run, *skips), {3: INF, 4: INF, 9: INF})
    assert ended.code == 0 and not ended.err
    assert marked(run) == marked(run, "non_finite") == [3, 4, 9]
    text = (run / "metrics.jsonl").read_text() + (run / "events.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text, "which are not JSON"
    assert all("loss" not in line and "lm_loss" in line for line in computed(run) if "skipped" in line), "the plain loss is a number"
    assert train(ranks, 2, words(tiny_data, other, "stability.skip_steps=[[3, 4], [9, 9]]")).code == 0
    assert differing(*(tensors(each / f"checkpoints/step_{STEPS:08d}") for each in (run, other))) == []
    again = tmp_path / "again"
    ended = train_disturbed(ranks, 1, words(tiny_data, again, *skips), {3: INF, 4: INF, 5: INF})
    assert ended.code == 2
    assert ended.errors[0].startswith(
        "step 5: the loss is inf, and the 2 steps before it were skipped (stability.max_skipped); the run stops."
    )
    assert checkpoints(again) == ["diverged_00000004"]


def test_stopping_in_the_first_step(ranks, tiny_data, tmp_path):
    """There is no optimizer state yet, and its parameters are kept all the same."""
    run = tmp_path / "run"
    ended = train_disturbed(ranks, 1, words(tiny_data, run), {1: INF})
    assert ended.code == 2 and "step 1: the loss is inf; the run stops. The parameters after 0 steps are in " in ended.err
    assert checkpoints(run) == ["diverged_00000000"]


BAD = {7: 100.0, 9: INF, 10: INF}
SKIPS = [
    "stability.loss_spike=skip", "stability.grad_norm_spike=skip", "stability.non_finite=skip", "stability.max_skipped=3",
    "stability.skip_steps=[[3, 4], [11, 11]]",
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(ranks, tiny_data, tmp_path_factory) -> Path:
    """A run that meets all of it and never stops."""
    run = tmp_path_factory.mktemp("whole") / "run"
    often = [*SKIPS, "checkpoint.interval_steps=3", "checkpoint.keep_last=100"]
    assert train_disturbed(ranks, 2, words(tiny_data, run, *often), BAD).code == 0
    assert marked(run) == [3, 4, 7, 9, 10, 11]
    return run


@pytest.mark.parametrize("done", [3, 6, 9])
def test_a_resumed_run_decides_alike(ranks, tiny_data, tmp_path, whole, done):
    """From among steps left out, from before a spike that is none without a memory, and from among steps skipped in a row."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for name in checkpoints(run):
        if name > f"step_{done:08d}":
            shutil.rmtree(run / "checkpoints" / name)
    ended = train_disturbed(ranks, 2, words(tiny_data, run, *SKIPS), BAD)
    assert ended.code == 0 and not ended.err and f"resumed    step_{done:08d}" in ended.out
    check_same(run, whole)


def test_steps_skipped_in_a_row_count_on_after_a_resume(ranks, tiny_data, tmp_path):
    run = tmp_path / "run"
    skips = words(tiny_data, run, "stability.non_finite=skip", "stability.max_skipped=2")
    assert train_disturbed(ranks, 1, skips, {3: INF, 4: INF, 5: INF}, stop=(4, 0, "SIGTERM")).code == 143
    ended = train_disturbed(ranks, 1, skips, {3: INF, 4: INF, 5: INF})
    assert ended.code == 2 and "step 5: the loss is inf, and the 2 steps before it were skipped" in ended.err


@pytest.mark.slow
def test_without_its_metrics_a_run_says_that_it_forgot(ranks, tiny_data, tmp_path):
    run = tmp_path / "run"
    assert train(ranks, 1, words(tiny_data, run), stop=(7, 0, "SIGTERM")).code == 143
    (run / "metrics.jsonl").unlink()
    ended = train(ranks, 1, words(tiny_data, run))
    assert ended.code == 0
    [said] = ended.err.splitlines()
    assert (
        said.startswith(f"warning: {run / 'metrics.jsonl'}: lines of the last steps before step 8 are missing")
        and "with 0 of 8 steps" in said
    )
    assert events(run, "spikes_forgotten") == [{"event": "spikes_forgotten", "step": 7, "known": 0}]


@pytest.mark.slow
def test_steps_to_leave_out_may_be_changed_behind_the_checkpoint(ranks, tiny_data, tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    first = words(tiny_data, run, "stability.skip_steps=[[2, 3], [10, 10]]")
    assert train(ranks, 1, first, stop=(5, 0, "SIGTERM")).code == 143
    assert events(run, "skip_steps_changed") == []
    for now, step in (("[[2, 3], [5, 6]]", 5), ("[[6, 7]]", 2), ("[]", 2), ("[[2, 4]]", 4)):
        ended = train(ranks, 1, words(tiny_data, run, f"stability.skip_steps={now}"))
        assert ended.code == 2
        [said] = ended.errors
        assert said.startswith(
            f"stability.skip_steps={now}: this run has done step {step} with [[2, 3], [10, 10]] (newest checkpoint: "
            f"{run / 'checkpoints/step_00000005'}); repeat stability.skip_steps=[[2,3],[10,10]], and change only steps from 6 on. "
        )
    assert (run / "config.yaml").read_text().count("- 10") == 2, "what was refused is not written down"
    ended = train(ranks, 1, words(tiny_data, run, "stability.skip_steps=[[6, 7], [2, 3]]"))
    assert ended.code == 0 and not ended.err
    assert events(run, "skip_steps_changed") == [{"event": "skip_steps_changed", "before": [[2, 3], [10, 10]], "now": [[6, 7], [2, 3]]}]
    assert train(ranks, 1, words(tiny_data, other, "stability.skip_steps=[[2, 3], [6, 7]]")).code == 0
    check_same(run, other)


def test_policies_may_not_be_changed(ranks, tiny_data, tmp_path):
    run = tmp_path / "run"
    assert train(ranks, 1, words(tiny_data, run), stop=(2, 0, "SIGTERM")).code == 143
    said = train(ranks, 1, words(tiny_data, run, "stability.loss_spike=skip", "stability.skip_steps=[[1, 1]]")).errors
    assert said[0].startswith("stability.skip_steps=[[1, 1]]: this run has done step 1 with [] (") and said[1] == (
        "stability.loss_spike: this run has warn, the recipe now says skip"
    )


@pytest.mark.parametrize(
    "setting, said",
    [
        ("non_finite=warn", "stability.non_finite=warn: it must be one of stop, skip"),
        ("loss_spike=never", "stability.loss_spike=never: it must be one of ignore, warn, skip, stop"),
        ("grad_norm_spike=1x", "stability.grad_norm_spike=1x: it must be one of ignore, warn, skip, stop"),
        ("window=7", "stability.window=7: it must be at least 8, since half of it must do for a standard deviation; 128 is usual"),
        ("sigmas=0", "stability.sigmas=0.0: it must be more than 0"),
        ("max_skipped=0", "stability.max_skipped=0: it must be more than 0"),
        ("skip_steps=[[4]]", "stability.skip_steps[0]=[4]: it must be [first step, last step]; write [4, 4] for a single one"),
        ("skip_steps=[[1, 2], []]", "stability.skip_steps[1]=[]: it must be [first step, last step]; e.g. [961, 976]"),
        (
            "skip_steps=[[5, 3]]",
            "stability.skip_steps[0]=[5, 3]: it must be [first step, last step] with 1 <= first <= last <= 12, the steps",
        ),
        ("skip_steps=[[0, 3]]", "stability.skip_steps[0]=[0, 3]: it must be [first step, last step] with 1 <= first"),
        ("skip_steps=[[12, 13]]", "stability.skip_steps[0]=[12, 13]: it must be [first step, last step] with 1 <= first"),
    ],
)
def test_bad_settings(tiny_data, setting, said):
    with pytest.raises(ConfigError) as raised:
        validate(tiny_config(tiny_data, "run_dir=unused", *WATCHED, f"stability.{setting}"), 1)
    [problem] = raised.value.problems
    assert problem.startswith(said)


@pytest.mark.parametrize(
    "setting, said",
    [
        ("skip_steps=[961]", "override stability.skip_steps=[961]: stability.skip_steps[0]=961: this must be a list, in brackets"),
        ("skip_steps=[[1, 2.5]]", "override stability.skip_steps=[[1, 2.5]]: stability.skip_steps[0][1]=2.5: this must be a whole number"),
    ],
)
def test_bad_types(tiny_data, setting, said):
    with pytest.raises(ConfigError) as raised:
        tiny_config(tiny_data, "run_dir=unused", f"stability.{setting}")
    [problem] = raised.value.problems
    assert problem.startswith(said)
