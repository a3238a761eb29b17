"""Host memory of saves: what is free, what is needed, and what happens where it is not enough."""

from pathlib import Path

import pytest

from hybrid_megatron.checkpoint.store import CheckpointStore, form_of
from hybrid_megatron.platform import available_host_memory
from tests.cpu import checkpoint_cells as cells
from tests.cpu.runs import checkpoints, computed, train
from tests.cpu.test_checkpoint_saver import events
from tests.cpu.tiny import tiny_words

MIB = 2**20


def host(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(limit: str, used: int, cached: int) -> dict[str, str]:
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": f"anon 1\nactive_file {cached}\ninactive_file 7\n"}


def test_what_is_free_is_the_least_that_any_limit_leaves(tmp_path):
    """Of a Slurm job under cgroup v2: the step has no limit, the job has one, and the machine has memory of its own."""
    files = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 5000 kB\n", "proc/self/cgroup": "0::/slurm/job_7/step_0\n"}
    assert available_host_memory(host(tmp_path, files)) == 5000 * 1024
    for folder, held in {
        "slurm/job_7/step_0": group("max", 900_000, 0),
        "slurm/job_7": group("3000000", 2_000_000, 500_000),
        "slurm": group("9000000", 1_000_000, 0),
    }.items():
        host(tmp_path / "sys/fs/cgroup" / folder, held)
    assert available_host_memory(tmp_path) == 1_500_007, "caches of files count as free"
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1000 kB\n")
    assert available_host_memory(tmp_path) == 1000 * 1024


def test_what_is_free_under_the_first_form_of_control_groups(tmp_path):
    limit = {
        "memory.limit_in_bytes": "4000000\n",
        "memory.usage_in_bytes": "3000000\n",
        "memory.stat": "total_active_file 100\ntotal_inactive_file 20\ninactive_file 9\n",
    }
    host(tmp_path / "sys/fs/cgroup/memory/job", limit)
    host(tmp_path / "sys/fs/cgroup/memory", limit | {"memory.limit_in_bytes": str(2**63 - 4096)})
    files = {"proc/meminfo": "MemAvailable: 9000 kB\n", "proc/self/cgroup": "5:cpuset:/job\n4:memory:/job/step\n0::/\n"}
    assert available_host_memory(host(tmp_path, files)) == 1_000_120


def test_a_system_that_does_not_tell(tmp_path):
    assert available_host_memory(tmp_path) is None


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_where_memory_is_short_training_waits_and_saves_what_it_can(ranks, tiny_data, tmp_path, size):
    """Rolling in place of permanent, at once in place of beside training; said once each, and the run goes on as any other."""
    plenty, little = tmp_path / "plenty", tmp_path / "little"
    words = tiny_words(
        tiny_data, "train.tokens=3072", "checkpoint.interval_steps=2", "checkpoint.permanent_interval_steps=4", "checkpoint.keep_last=9"
    )
    assert train(ranks, size, [*words, f"run_dir={plenty}"]).code == 0
    ended = ranks.run(size, cells.train_with_little_memory, [*words, f"run_dir={little}"], MIB // 4, {})
    assert {each.code for each in ended} == {0}
    waits, rolling = ended[0].err.splitlines()
    assert waits.startswith(
        f"warning: {little}/checkpoints/step_00000002: training waits while it is written, since a copy in host memory "
    )
    assert rolling.startswith(f"warning: {little}/checkpoints/step_00000004: saved as a rolling checkpoint, since a permanent one gathers ")
    assert all(" has 0.25 MiB of memory free, and its ranks need " in line for line in (waits, rolling))
    assert [(event["checkpoint"][-1], event["instead"]) for event in events(little, "short_of_memory")] == [
        ("2", "waited"), ("4", "rolling"), ("4", "waited"), ("6", "rolling"),
    ]  # fmt: skip
    assert {form_of(path) for path in CheckpointStore(little).complete()} == {"rolling"}
    assert computed(little) == computed(plenty) and checkpoints(little) == checkpoints(plenty)
    assert "complete   this run has done all its 6 steps" in train(ranks, size, [*words, f"run_dir={little}"]).out


@pytest.mark.parametrize("size, layout", [(1, []), (2, ["parallel.tensor=2"])])
def test_memory_of_gathering(ranks, tiny_data, size, layout):
    """Never more than is asked for, and not much less."""
    words = tiny_words(tiny_data, "run_dir=unused", "train.precision=bf16", *layout)
    for most, said in ranks.run(size, cells.most_memory_of_a_gather, words):
        assert 0.8 * said <= most <= said, (most, said)


@pytest.mark.slow
def test_reading_a_permanent_one_where_memory_is_short(ranks, tiny_data, tmp_path):
    """Said before it is done, and done."""
    words = tiny_words(tiny_data, f"run_dir={tmp_path / 'run'}", "train.tokens=1536")
    assert train(ranks, 2, words, stop=(2, 0, "SIGINT")).code == 130
    ended = ranks.run(2, cells.train_with_little_memory, words, MIB // 4, {})
    assert [each.code for each in ended] == [0, 0] and "resumed    step_00000002" in ended[0].out
    reads = (
        f"warning: {tmp_path}/run/checkpoints/step_00000002: a permanent checkpoint, of which every rank reads the whole optimizer state"
    )
    assert ended[0].err.startswith(reads) and len(ended[0].err.splitlines()) == 2, "the other is about the last checkpoint"
