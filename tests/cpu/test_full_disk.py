"""A disk that is full, or gives out, or may not be written: one sentence, exit code 2, and what was there stays."""

import contextlib
import errno
import json
import os
import subprocess
import unittest.mock
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cpu.runs import Ended, checkpoints, command, computed, snapshot, train
from tests.cpu.tiny import tiny_words


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[None]:
    """A file system of its own, of this size; skips the test where mounting is not permitted."""
    folder.mkdir()
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip("this user may not mount a small file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def half_run(ranks, tiny_data, tmp_path):
    """A run of eight steps with a checkpoint after step 4, and its words."""
    run = tmp_path / "run"
    words = tiny_words(tiny_data, f"run_dir={run}", "train.tokens=4096")
    assert train(ranks, 1, words, stop=(4, 0, "SIGTERM")).code == 143
    return run, words


def check_kept(run: Path, kept: dict) -> None:
    now = snapshot(run / "checkpoints")
    assert now == kept, "older checkpoints are untouched and nothing is left over"


# One rank's file of a checkpoint has 1.1 MB; of two ranks', the first writes the most. In the last case the second rank alone fails.
@pytest.mark.parametrize("size, limit, rank", [(1, 500_000, None), (2, 20_000, 1), pytest.param(2, 200_000, None, marks=pytest.mark.slow)])
def test_write_fails_in_the_middle_of_a_save(ranks, half_run, size, limit, rank):
    run, words = half_run
    kept = snapshot(run / "checkpoints")
    ended = train(ranks, size, words, file_limit=limit, file_limit_rank=rank)
    assert ended.code == 2
    [said] = ended.errors
    assert "step_00000008: not saved, File too large; the newest complete checkpoint is step_00000004" in said
    check_kept(run, kept)
    assert train(ranks, size, words).code == 0, "with room again, the same command resumes"
    assert len(computed(run)) == 8


def metadata_fails(words: list[str]) -> Ended:
    """The disk gives out when all shards are written and rank 0 alone writes `.metadata`."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with unittest.mock.patch("torch.distributed.checkpoint.filesystem.pickle.dump", side_effect=full):
        return command(words)


@pytest.mark.parametrize("size", [1, 2])
def test_metadata_alone_cannot_be_written(ranks, half_run, size):
    run, words = half_run
    kept = snapshot(run / "checkpoints")
    ended = ranks.run(size, metadata_fails, words)
    assert [each.code for each in ended] == [2] * size
    assert "step_00000008: not saved, No space left on device" in ended[0].errors[0]
    check_kept(run, kept)


@pytest.mark.parametrize("size", [1, 2])
def test_metrics_cannot_be_written(ranks, half_run, size):
    run, words = half_run
    kept = snapshot(run / "checkpoints")
    metrics = run / "metrics.jsonl"
    first, rest = metrics.read_text().split("\n", 1)
    longer = json.loads(first) | {"note": "longer than any other file of the folder's " + "x" * (run / "config.yaml").stat().st_size}
    metrics.write_text(f"{json.dumps(longer)}\n{rest}")
    ended = train(ranks, size, words, file_limit=metrics.stat().st_size + 100)
    assert ended.code == 2
    [said] = ended.errors
    assert "metrics.jsonl: cannot be written (File too large)" in said
    check_kept(run, kept)
    assert train(ranks, size, words).code == 0
    assert len(computed(run)) == 8


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_disk_is_full(ranks, tiny_data, tmp_path, size):
    """The need is known before anything is written: the free space is asked for first."""
    disk = tmp_path / "disk"
    with mounted(disk, "1900k"):
        words = tiny_words(tiny_data, f"run_dir={disk / 'run'}", "checkpoint.interval_steps=5", "checkpoint.keep_last=1")
        ended = train(ranks, size, words)
        assert ended.code == 2
        [said] = ended.errors
        assert "step_00000010: not saved, it needs 0.79 MiB and the disk has 0." in said
        assert "MiB free; the newest complete checkpoint is step_00000005" in said
        assert checkpoints(disk / "run") == ["step_00000005"]
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        assert train(ranks, size, words).code == 0
        assert len(computed(disk / "run")) == 20 and checkpoints(disk / "run") == ["step_00000020"]


def test_disk_fills_up_in_the_middle_of_a_save(ranks, tiny_data, tmp_path):
    """There is room for what must be written, and too little for all that is."""
    disk = tmp_path / "disk"
    with mounted(disk, "1m"):
        words = tiny_words(tiny_data, f"run_dir={disk / 'run'}")
        ended = train(ranks, 1, words)
        [said] = ended.errors
        assert ended.code == 2 and "step_00000010: not saved, No space left on device; there is no earlier one" in said
        assert checkpoints(disk / "run") == []


def test_read_only_run_folder(ranks, tiny_data, tmp_path):
    disk = tmp_path / "disk"
    with mounted(disk, "8m"):
        words = tiny_words(tiny_data, f"run_dir={disk / 'run'}")
        assert train(ranks, 1, words, stop=(4, 0, "SIGTERM")).code == 143
        kept = snapshot(disk)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for size, run in ((1, "run"), (2, "run"), (1, "new")):
            ended = train(ranks, size, [*words, f"run_dir={disk / run}"])
            assert ended.code == 2
            [said] = ended.errors
            assert said == f"run_dir={disk / run}: cannot write there (Read-only file system); give another with run_dir=PATH"
        assert snapshot(disk) == kept


def test_run_folder_that_cannot_be(ranks, tiny_data, tmp_path):
    (tmp_path / "file").write_text("")
    ended = train(ranks, 2, tiny_words(tiny_data, f"run_dir={tmp_path / 'file/run'}"))
    assert ended.code == 2 and "cannot write there (Not a directory)" in ended.errors[0]
