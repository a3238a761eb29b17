"""cluster.env is read to its end before anything is submitted."""

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
    check_cluster_env()


def test_a_file_that_is_named_and_missing(file):
    with pytest.raises(ConfigError, match=f"HYBRID_MEGATRON_CLUSTER={file}: there is no such file"):
        check_cluster_env()


def test_sbatch_has_its_variables(file):
    file.write_text("SBATCH_PARTITION=h200\necho hello\n")
    ended = ask_sbatch(["bash", "-c", "echo $SBATCH_PARTITION"])
    assert ended.stdout == "h200\n" and ended.stderr == "hello\n"
