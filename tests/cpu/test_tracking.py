"""wandb is a mirror of metrics.jsonl: one run a folder, and never the reason for a run to end."""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import unittest.mock

import psutil
import pytest

from hybrid_megatron.code_version import code_version
from hybrid_megatron.config import load_recipe, save_config
from hybrid_megatron.config.validate import validate
from hybrid_megatron.errors import ConfigError
from hybrid_megatron.model.accounting import account
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.training import wandb_mirror
from hybrid_megatron.training.wandb_files import recorded_steps
from tests.cpu.runs import Ended, command, computed, train
from tests.cpu.tiny import tiny_config, tiny_words
from tests.cpu.wandb_server import StoredRun, wandb_server

SHORT = ["train.tokens=2048", "validation.interval_steps=100"]


def test_disabled_writes_nothing(ranks, tiny_data, tmp_path):
    run = tmp_path / "run"
    assert train(ranks, 1, tiny_words(tiny_data, f"run_dir={run}", "tracking.wandb=disabled", *SHORT)).err == ""
    assert sorted(path.name for path in run.iterdir()) == [
        ".lock.1", "RUN_ID", "checkpoints", "config.yaml", "events.jsonl", "logs", "loss.png", "metrics.jsonl",
    ]  # fmt: skip


class Broken:
    """A wandb that starts and then fails at every call, or does not start."""

    def __init__(self, starts: bool):
        self.starts = starts
        self.Settings = dict

    def init(self, **_):
        if not self.starts:
            raise ConnectionError("no network\nand more of it")
        run = unittest.mock.Mock()
        run.log.side_effect = OSError("the service is gone")
        return run


def without_wandb(words: list[str], stand_in: Broken | None) -> Ended:
    """`stand_in` in place of the package; None: it cannot be imported."""
    with unittest.mock.patch.dict(sys.modules, {"wandb": stand_in}):
        return command(words)


@pytest.mark.parametrize(
    "stand_in, warning",
    [
        (None, "wandb cannot be imported (import of wandb halted; None in sys.modules), so this run is not mirrored there"),
        (Broken(starts=False), "wandb does not start (no network), so this run is not mirrored there"),
        (Broken(starts=True), "wandb failed (the service is gone), so it has no more of this run"),
    ],
)
def test_a_missing_or_broken_wandb_is_a_warning(ranks, tiny_data, tmp_path, stand_in, warning):
    run = tmp_path / "run"
    [ended] = ranks.run(1, without_wandb, tiny_words(tiny_data, f"run_dir={run}", "tracking.wandb=offline", *SHORT), stand_in)
    [said] = ended.err.splitlines()
    assert ended.code == 0 and said.startswith(f"warning: {warning}")
    assert len(computed(run)) == 4


class Recorder:
    """A wandb that starts, and keeps what it is told."""

    def __init__(self):
        self.settings: dict = {}
        self.told: dict = {}
        self.summary: dict = {}
        self.rows: list[tuple[int | None, dict]] = []
        self.resumed = False
        self.axes: list[tuple] = []

    def Settings(self, **settings):
        self.settings = settings

    def init(self, **told):
        self.told = told
        return self

    def define_metric(self, name, step_metric):
        self.axes.append((name, step_metric))

    def log(self, row, step=None):
        self.rows.append((step, row))

    def finish(self, exit_code):
        self.ended = exit_code


def recorded(words: list[str], resumed: bool = False, summary: dict | None = None, environment: dict | None = None, **how):
    """The train command with a Recorder for wandb, which is returned; `resumed`: the server has this run, with this summary."""
    recorder = Recorder()
    recorder.resumed, recorder.summary = resumed, dict(summary or {})
    with (
        unittest.mock.patch.dict(sys.modules, {"wandb": recorder}),
        unittest.mock.patch.dict(os.environ, environment or {}),
    ):
        return command(words, **how), recorder


def lines_of(run) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_RESTART_COUNT": "3"}


def test_what_wandb_is_told(ranks, tiny_data, tmp_path):
    run = tmp_path / "run"
    words = tiny_words(
        tiny_data, f"run_dir={run}", "tracking.wandb=online", "tracking.group=main", "tracking.job_type=pretrain_4k", 
        "tracking.tags=[a, b]", "tracking.entity=us", "tracking.project=p", *SHORT,
    )  # fmt: skip
    [(ended, wandb)] = ranks.run(1, recorded, words, False, None, JOB)
    assert ended.code == wandb.ended == 0 and not ended.err
    told = wandb.told
    assert (told["id"], told["resume"], told["mode"], told["dir"]) == ((run / "RUN_ID").read_text().strip(), "allow", "online", str(run))
    assert (told["project"], told["entity"], told["name"], told["group"], told["job_type"]) == ("p", "us", "run", "main", "pretrain_4k")
    assert told["tags"] == ["a", "b"]
    config = told["config"]
    facts = config.pop("run_facts")
    assert config == dataclasses.asdict(load_recipe([str(run / "config.yaml")])), "the resolved recipe"
    assert facts["slurm"] == {"job_id": "4711", "job_nodelist": "node[1-2]", "restart_count": "3"}
    assert facts["packages"]["megatron-core"] == "0.19.2" and facts["packages"].keys() >= {"python", "torch", "numpy"}
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", facts["code_version"])
    accounts = account(tiny_config(tiny_data), plan_layers(tiny_config(tiny_data)))
    assert (facts["parameters"], facts["flops_per_token"]) == (accounts.total_params, accounts.flops_per_token)
    assert (facts["world_size"], facts["layout"]["data"], facts["starts"]) == (1, 1, 1)
    assert wandb.summary == facts
    assert not {"x_disable_stats", "x_disable_meta", "x_disable_machine_info"} & wandb.settings.keys(), "system metrics are on"
    assert wandb.axes == [("*", "step")]
    assert wandb.rows == [(None, line) for line in lines_of(run)], "with tokens in every one"
    assert all({"step", "tokens"} <= row.keys() for _, row in wandb.rows)
    assert "sync" not in ended.out


def test_offline_rows_are_counted_by_our_own_steps_over_all_starts(ranks, tiny_data, tmp_path):
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "tracking.wandb=offline", *SHORT)
    [(ended, first)] = ranks.run(1, _stopped_at_2, words)
    assert ended.code == 143 and shlex.split(ended.out.splitlines()[-1])[-2:] == ["sync", str(run / "wandb")]
    [(ended, second)] = ranks.run(1, _recorded_behind_2, words)
    assert [step for step, _ in first.rows + second.rows] == [1, 2, 3, 4]
    assert (first.told["id"], first.summary["starts"]) == (second.told["id"], 1) and second.summary["starts"] == 2
    assert ended.out.splitlines()[-1].startswith("wandb      offline; to upload this run, all its parts: ")


def _stopped_at_2(words: list[str]):
    return recorded(words, stop=(2, 0, "SIGTERM"))


def _recorded_behind_2(words: list[str]):
    """As if a Recorder wrote files."""
    with unittest.mock.patch.object(wandb_mirror, "recorded_steps", lambda folder, run_id: {1, 2}):
        return recorded(words)


def test_what_a_killed_job_had_not_sent_is_sent_by_the_next(ranks, tiny_data, tmp_path):
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "tracking.wandb=online", *SHORT)
    assert ranks.run(1, _stopped_at_2, words)[0][0].code == 143
    [(_, wandb)] = ranks.run(1, recorded, words, True, {"step": 1})
    assert [row for _, row in wandb.rows] == lines_of(run)[1:]


def test_a_new_stage_is_a_new_run(ranks, tiny_data, tmp_path):
    """It starts from the parameters of another run, and is none of its parts."""
    first, second = tmp_path / "first", tmp_path / "second"
    [(_, before)] = ranks.run(1, recorded, tiny_words(tiny_data, f"run_dir={first}", "tracking.wandb=online", *SHORT))
    [(_, after)] = ranks.run(1, recorded, tiny_words(tiny_data, f"run_dir={second}", f"init_from={first}", "tracking.wandb=online", *SHORT))
    assert before.told["id"] != after.told["id"] and after.told["config"]["init_from"] == str(first)


DATA = ["data.train=unused", "data.valid=unused"]


@pytest.mark.parametrize(
    "words, group, job_type, tags",
    [
        (["776m+gdn_nope_lh+pretrain_4k"], None, "pretrain_4k", ["776m", "gdn_nope_lh", "pretrain_4k"]),
        (["main:776m+gdn_nope_lh+extend_32k"], "main", "extend_32k", ["776m", "gdn_nope_lh", "extend_32k"]),
        (["main:776m+gdn_nope_lh+pretrain_4k", "tracking.group=mine", "tracking.tags=[]"], "mine", "pretrain_4k", []),
        (["776m+rope+pretrain_4k", "tracking.job_type=try"], None, "try", ["776m", "rope", "pretrain_4k"]),
    ],
)
def test_study_and_stage_of_a_recipe(tmp_path, words, group, job_type, tags):
    tracking = load_recipe([*words, *DATA]).tracking
    assert (tracking.group, tracking.job_type, tracking.tags) == (group, job_type, tags)
    save_config(load_recipe([*words, *DATA]), tmp_path / "config.yaml")
    assert load_recipe([str(tmp_path / "config.yaml")]).tracking == tracking, "read back from a run folder it is the same"


@pytest.mark.parametrize(
    "setting, said",
    [
        ("project=a/b", "tracking.project=a/b: wandb takes 1 to 128 characters, and none of / \\ # ? % :; use another name"),
        ("project=''", "tracking.project=: wandb takes 1 to 128 characters"),
        (f"tags=[a, {'x' * 65}]", f"tracking.tags[1]={'x' * 65}: wandb takes 1 to 64 characters; shorten it"),
    ],
)
def test_what_wandb_would_refuse(tiny_data, setting, said):
    with pytest.raises(ConfigError) as raised:
        validate(tiny_config(tiny_data, "run_dir=unused", f"tracking.{setting}"), 1)
    [problem] = raised.value.problems
    assert problem.startswith(said)


def git(folder, *words: str) -> str:
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    return subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True).stdout.strip()


def test_version_of_the_code(tmp_path):
    """Of a checkout, clean or not; of a copy inside of one; of neither."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    git(checkout, "init")
    (checkout / "launch").mkdir()
    (checkout / "launch/code.py").write_text("1\n")
    git(checkout, "add", "launch")
    git(checkout, "commit", "-m", "first")
    commit = git(checkout, "rev-parse", "HEAD")
    copy = checkout / "runs/some/code/1234"
    copy.mkdir(parents=True)
    (checkout / "notes.txt").write_text("mine\n")
    assert code_version(checkout) == commit, "files beside the code are no change of it"
    assert code_version(copy) is None, "not that of the checkout around it"
    (copy / "code_version").write_text(f"{commit}-dirty\n")
    assert code_version(copy) == f"{commit}-dirty"
    (checkout / "launch/new.py").touch()
    assert code_version(checkout) == f"{commit}-dirty", "code that git does not know runs all the same"
    (checkout / "launch/new.py").unlink()
    (checkout / "launch/code.py").write_text("2\n")
    assert code_version(checkout) == f"{commit}-dirty"
    assert code_version(tmp_path) is None


KEY = {"WANDB_API_KEY": "0" * 40}


def with_wandb(words: list[str], environment: dict, **how) -> Ended:
    """The train command with wandb itself, in this environment, and little patience."""
    import wandb

    wandb.teardown()  # what it has read of another environment
    with unittest.mock.patch.dict(os.environ, environment), unittest.mock.patch.object(wandb_mirror, "_INIT_SECONDS", 3.0):
        ended = command(words, **how)
        wandb.teardown()
    return ended


def with_wandb_stopped_at_2(words: list[str], environment: dict) -> Ended:
    return with_wandb(words, environment, stop=(2, 0, "SIGTERM"))


def rows_of(stored: StoredRun) -> list[dict]:
    """The rows of a run as the server has them, in their order, without wandb's own columns."""
    assert sorted(stored.history) == list(range(len(stored.history))), "none of them took another's place"
    return [{key: value for key, value in stored.history[place].items() if not key.startswith("_")} for place in sorted(stored.history)]


def with_wandb_killed_after_2(words: list[str], signal_name: str, **how) -> Ended:
    """wandb's own process gets a signal once it has been told of step 2."""
    plain, killed = wandb_mirror.WandbMirror._log, []

    def log(mirror, line):
        plain(mirror, line)
        if line["step"] == 2 and not killed:
            killed.append(line)
            [service] = [child for child in psutil.Process().children() if "wandb-core" in child.name()]
            service.send_signal(getattr(signal, signal_name))
            service.wait(20)

    with unittest.mock.patch.object(wandb_mirror.WandbMirror, "_log", log):
        return with_wandb(words, {}, **how)


@pytest.mark.parametrize(
    "signal_name",
    ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow), pytest.param("SIGKILL", marks=pytest.mark.slow)],
)
def test_wandbs_process_dies(ranks, tiny_data, tmp_path, signal_name):
    """As Slurm's signals make it: the end of the run begins another one, and its rows are all there."""
    pytest.importorskip("wandb")
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "tracking.wandb=offline", *SHORT)
    [ended] = ranks.run(1, with_wandb_killed_after_2, words, signal_name)
    assert ended.code == 0 and not ended.err
    assert recorded_steps(run / "wandb", (run / "RUN_ID").read_text().strip()) == {1, 2, 3, 4}


def test_rows_that_a_killed_start_had_not_written_are_in_the_next_ones_file(ranks, tiny_data, tmp_path):
    pytest.importorskip("wandb")
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "tracking.wandb=offline", *SHORT)
    assert ranks.run(1, with_wandb_stopped_at_2, words, {})[0].code == 143
    run_id = (run / "RUN_ID").read_text().strip()
    [file] = (run / "wandb").glob(f"offline-run-*/run-{run_id}.wandb")
    assert recorded_steps(run / "wandb", run_id) == {1, 2}
    whole = file.read_bytes()
    for length in range(0, len(whole), 101):  # wherever it was cut off
        file.write_bytes(whole[:length])
        assert recorded_steps(run / "wandb", run_id) in (set(), {1}, {1, 2})
    file.write_bytes(whole[:7])
    time.sleep(1.1)  # wandb names its folders by the second
    assert ranks.run(1, with_wandb, words, {})[0].code == 0
    assert recorded_steps(run / "wandb", run_id) == {1, 2, 3, 4}


@pytest.mark.slow
def test_without_a_network_parts_are_offline_and_come_together(ranks, tiny_data, tmp_path):
    """A key, but no server; then a start that is offline by its recipe; then wandb's own program with the command that the run printed."""
    pytest.importorskip("wandb")
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "tracking.group=main", *SHORT)
    nobody = KEY | {"WANDB_BASE_URL": "http://127.0.0.1:9"}
    [ended] = ranks.run(1, with_wandb_stopped_at_2, [*words, "tracking.wandb=auto"], nobody)
    assert ended.code == 143
    [said] = [line for line in ended.err.splitlines() if line.startswith("warning: ")]
    assert re.fullmatch(r"warning: wandb does not start online \(.+\), so this run is mirrored offline", said)
    run_id = (run / "RUN_ID").read_text().strip()
    assert re.fullmatch(r"[0-9a-f]{8}", run_id)
    time.sleep(1.1)  # wandb names its folders by the second
    [ended] = ranks.run(1, with_wandb, [*words, "tracking.wandb=offline"], {})
    assert ended.code == 0 and not ended.err
    parts = sorted(path.name for path in (run / "wandb").glob("offline-run-*"))
    assert len(parts) == 2 and all(name.endswith(f"-{run_id}") for name in parts)
    printed = shlex.split(ended.out.splitlines()[-1].partition("parts: ")[2])
    with wandb_server() as server:
        environment = os.environ | KEY | {"WANDB_BASE_URL": server.url}
        synced = subprocess.run(printed, env=environment, capture_output=True, text=True, timeout=60)
        assert synced.returncode == 0, synced.stderr
        [(name, stored)] = server.runs.items()
    assert name == run_id and rows_of(stored) == lines_of(run)
    assert [stored.history[place]["_step"] for place in range(4)] == [1, 2, 3, 4]
    assert stored.described["groupName"] == "main" and stored.summary["starts"] == 2


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_its_server_copy(ranks, tiny_data, tmp_path):
    """Though the server lacks the last row of the job before, which was killed."""
    pytest.importorskip("wandb")
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", *SHORT)
    with wandb_server() as server:
        environment = KEY | {"WANDB_BASE_URL": server.url}
        [ended] = ranks.run(1, with_wandb_stopped_at_2, [*words, "tracking.wandb=auto"], environment)
        assert ended.code == 143 and "warning" not in ended.err
        [(name, stored)] = server.runs.items()
        assert name == (run / "RUN_ID").read_text().strip() and rows_of(stored) == lines_of(run)
        del stored.history[1]
        stored.summary["step"] = 1
        assert ranks.run(1, with_wandb, [*words, "tracking.wandb=auto"], environment)[0].code == 0
        assert list(server.runs) == [name]
    assert rows_of(stored) == lines_of(run) and stored.summary["starts"] == 2
