"""cluster.env is read to its end before anything is submitted."""

import re
import sys
import warnings

import pytest

from hybrid_megatron.errors import ConfigError
from hybrid_megatron.slurm.cluster_env import ask_sbatch, check_cluster_env
from tests.cpu.runs import CHECKOUT

WRONG = {
    "syntax": ("export A=1\nif [[ -n $A ]]; then\n", "bash cannot read it ({file}: line 3: syntax error: unexpected end of file"),
    "quotes": ("export A='x\n", "bash cannot read it ({file}: line 1: unexpected EOF while looking for matching"),
    "exit": ("export A=1\nexit 0\nexport B=2\n", "hides what stands behind (line 2: exit 0)"),
    "exit in a function": ("no() {\n    exit\n}\nno\n", "hides what stands behind (line 2: exit)"),
    "return": ("if true; then\n    return 0\nfi\nexport B=2\n", "hides what stands behind (line 2: return 0)"),
    "set -e": ("set -e\nfalse\n", "(exit code 1)"),
}
RIGHT = {
    "nothing": "",
    "return of a function": "known() { return 1; }\nknown || export A=1\n",
    "exit of a subshell": "A=$(exit 3)\n(exit 1)\nexport exit_code=1\n",
    "a command that fails": "module load cuda\nfalse\n",
    "another file that returns": "source {other}\n",
    "output": "echo hello\n",
    "the example": (CHECKOUT / "slurm/cluster.example.env").read_text(),
}
ON = "; it is read on, without what that was to set"
WARNED = {
    "a command that fails": ["{file}: line 1, module load cuda (exit code 127): module: command not found, and 1 more" + ON],
    "exit of a subshell": ["{file}: line 1, A=$(exit 3) (exit code 3), and 1 more" + ON],
}


@pytest.fixture
def file(tmp_path, monkeypatch):
    file = tmp_path / "cluster.env"
    monkeypatch.setenv("HYBRID_MEGATRON_CLUSTER", str(file))
    return file


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_read_to_its_end(file, case):
    contents, said = WRONG[case]
    file.write_text(contents)
    with pytest.raises(ConfigError) as refused:
        check_cluster_env()
    [sentence] = refused.value.problems
    assert sentence.startswith(f"{file}: ") and said.replace("{file}", str(file)) in sentence


@pytest.mark.parametrize("case", RIGHT)
def test_what_can(file, tmp_path, case):
    (tmp_path / "other").write_text("return 0\n")
    file.write_text(RIGHT[case].replace("{other}", str(tmp_path / "other")))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        check_cluster_env()
    assert [str(each.message) for each in told] == [said.replace("{file}", str(file)) for said in WARNED.get(case, [])]


def test_a_file_that_is_named_and_missing(file):
    with pytest.raises(ConfigError, match=f"HYBRID_MEGATRON_CLUSTER={file}: there is no such file"):
        check_cluster_env()


def test_sbatch_has_its_variables(file):
    file.write_text("SBATCH_PARTITION=h200\necho hello\n")
    ended = ask_sbatch(["bash", "-c", "echo $SBATCH_PARTITION"])
    assert ended.stdout == "h200\n" and ended.stderr == "hello\n"


PYTHONS = {
    "missing": ("/nowhere/python", "No such file or directory"),
    "missing command": ("no_such_python", "exec: no_such_python: not found"),
    "without packages": ("{bare}", "ModuleNotFoundError: No module named "),
}


@pytest.mark.parametrize("case", PYTHONS)
def test_a_python_that_cannot_run_the_project(file, tmp_path, case):
    python, reason = PYTHONS[case]
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    python = python.replace("{bare}", str(bare))
    file.write_text(f"PYTHON={python}\n")
    with pytest.raises(
        ConfigError, match=re.escape(f"{file}: PYTHON={python} cannot be run on this node or lacks the project's") + ".*" + reason
    ):
        check_cluster_env()
    for elsewhere in (
        "CONTAINER=(apptainer exec x.sif)",
        "SRUN_OPTIONS=(--container-image=x)",
        "if [[ -n ${SLURM_JOB_ID:-} ]]; then CONTAINER=(apptainer); fi",
    ):
        file.write_text(f"PYTHON={python}\n{elsewhere}\n")
        check_cluster_env()
    file.write_text(f"if [[ -n ${{SLURM_JOB_ID:-}} ]]; then PYTHON={python}; fi\n")
    check_cluster_env()


@pytest.mark.parametrize("python", [sys.executable, ".venv/bin/python"])
def test_a_python_that_can(file, python):
    file.write_text(f"PYTHON={python}\n")
    check_cluster_env()


def test_variables_of_sbatch(file, monkeypatch):
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    file.write_text("SBATCH_GRES=gpu:4\nset -u\n")
    told = check_cluster_env()
    assert (told["SBATCH_GRES"], told["SBATCH_ACCOUNT"]) == ("gpu:4", "mine")
