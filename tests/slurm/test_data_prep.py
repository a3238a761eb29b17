"""An array of jobs that tokenizes: the parts of many nodes, joined, are what one process makes, also when one of them is killed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu.runs import CHECKOUT
from tests.cpu.test_data_prep_parts import files_of, model, words, write_shards  # noqa: F401  model is a fixture
from tests.slurm.jobs import cluster_env

ARRAY = "slurm/data_prep_array.sbatch"


@pytest.mark.slow
def test_an_array_and_its_join(cluster, model, tmp_path):  # noqa: F811
    shards = write_shards(tmp_path / "in")
    environment = {"HYBRID_MEGATRON_CLUSTER": str(cluster_env(tmp_path))}
    tokenize = words(model, shards, tmp_path / "out")[1:]

    def submit(*options: str) -> str:
        log = f"--output={tmp_path}/%A_%a.out"
        return cluster.sbatch("--cpus-per-task=1", log, *options, ARRAY, *tokenize, cwd=CHECKOUT, environment=environment)

    parts = submit("--array=0-2")
    join = submit("--array=0", f"--dependency=afterok:{parts}")
    cluster.wait_for_state(join, "COMPLETED", seconds=120)
    assert _outputs(tmp_path / "out") == _outputs(_alone(model, shards, tmp_path / "alone"))


def _alone(model: Path, shards: Path, output: Path) -> Path:  # noqa: F811
    subprocess.run([sys.executable, "-m", "data_prep", *words(model, shards, output)], cwd=CHECKOUT, check=True, capture_output=True)
    return output


def _outputs(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in files_of(folder).items() if name.endswith((".bin", ".idx"))}
