"""wandb is a mirror of metrics.jsonl: one run a folder, and never the reason for a run to end."""

import re
import sys
import unittest.mock

import pytest

from tests.cpu.runs import Ended, command, computed, train
from tests.cpu.tiny import tiny_words

SHORT = ["train.tokens=2048", "validation.interval_steps=100"]


def test_offline_run_has_the_id_of_its_folder_and_keeps_it(ranks, tiny_data, tmp_path):
    pytest.importorskip("wandb")
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "tracking.wandb=offline", *SHORT)
    assert train(ranks, 1, words, stop=(2, 0, "SIGTERM")).code == 143
    run_id = (run / "RUN_ID").read_text().strip()
    assert re.fullmatch(r"[0-9a-f]{8}", run_id)
    assert train(ranks, 1, words).code == 0
    assert (run / "RUN_ID").read_text().strip() == run_id
    runs = sorted(path.name for path in (run / "wandb").glob("offline-run-*"))
    assert len(runs) == 2 and all(name.endswith(f"-{run_id}") for name in runs), "two parts of one run"
    assert all(list((run / "wandb" / name).glob(f"run-{run_id}.wandb")) for name in runs)
    assert len(computed(run)) == 4


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
        (None, "wandb is not installed, so this run is not mirrored there"),
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
