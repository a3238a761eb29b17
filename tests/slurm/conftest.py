"""One cluster for all tests here, a tiny dataset, and the runs that nothing disturbs."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.cpu.tiny import make_tiny_data
from tests.slurm.cluster import Cluster, why_not
from tests.slurm.jobs import Training, cluster_env, undisturbed_metrics


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    """Three nodes: two for a job, and one to go on with when one of them dies."""
    if reason := why_not():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    try:
        with Cluster(folder, nodes=3) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(running_cluster) -> Iterator[Cluster]:
    """Idle, with all nodes."""
    yield running_cluster
    running_cluster.tidy()


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    """Folder with `train` and `valid` datasets of 256 words, their manifests and index maps."""
    return make_tiny_data(tmp_path_factory.mktemp("tiny_data"))


@pytest.fixture
def training(cluster, tiny_data, tmp_path) -> Callable[..., Training]:
    """Makes a training to submit: `training("a.b=c", ..., nodes=2)`; its run folder is `tmp_path/run`, or on the small disk. `settings`
    are lines of its cluster.env."""

    def make(*overrides: str, nodes: int = 1, on_small_disk: bool = False, settings: Sequence[str] = ()) -> Training:
        folder, env = cluster.small_disk if on_small_disk else tmp_path, cluster_env(tmp_path, *settings)
        made = Training(cluster, tiny_data, folder / "run", env, nodes, overrides)
        made.run = cluster.seen(made.run) if on_small_disk else made.run
        return made

    return make


@pytest.fixture(scope="session")
def undisturbed(tiny_data, tmp_path_factory) -> Callable[[int], list[dict]]:
    """`undisturbed_metrics` of a number of processes, computed once."""
    known: dict[int, list[dict]] = {}

    def of(processes: int) -> list[dict]:
        if processes not in known:
            known[processes] = undisturbed_metrics(tiny_data, tmp_path_factory.mktemp("undisturbed") / "run", processes)
        return known[processes]

    return of
