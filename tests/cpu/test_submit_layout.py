"""`launch submit` plans and submits the layout that a plain sbatch of the same words trains with."""

import shutil
import subprocess
from pathlib import Path

import pytest

from hybrid_megatron.config import RunConfig, load_recipe
from hybrid_megatron.errors import ConfigError
from hybrid_megatron.slurm import checks, layout
from hybrid_megatron.slurm.layout import Handed, words_of_job
from hybrid_megatron.slurm.template import TEMPLATES
from launch import submit
from tests.cpu.runs import CHECKOUT
from tests.cpu.test_submit import called, no_slurm, slurm  # noqa: F401

DATA = ("data.train=/data/train", "data.valid=/data/valid")
SIZES = [path.stem for path in sorted((CHECKOUT / "recipes/models").glob("*.yaml")) if path.stem[0].isdigit()]


@pytest.fixture(autouse=True)
def no_data(monkeypatch):
    monkeypatch.setattr(checks, "open_dataset", lambda config, split: None)


def trained(script: str | Path, words: list[str], folder: Path) -> RunConfig:
    """What a job would train, of which sbatch was asked with this script and these words."""
    (folder / "slurm").mkdir(parents=True, exist_ok=True)
    (folder / "slurm/job.sh").write_text("run_job() { printf '%s\\n' \"$@\"; }\n")
    said = subprocess.run([shutil.which("bash"), str(script), *words], cwd=folder, capture_output=True, text=True, check=True).stdout
    return load_recipe(said.splitlines())


@pytest.mark.parametrize("gpus", TEMPLATES)
@pytest.mark.parametrize("size", SIZES)
def test_as_with_a_plain_sbatch(slurm, tmp_path, size, gpus):  # noqa: F811
    short = [f"{size}+gdn_nope_lh+pretrain_4k", *DATA, f"run_dir={tmp_path / 'short'}"]
    long = [f"{size}+gdn_nope_lh+extend_32k", *DATA, f"run_dir={tmp_path / 'long'}"]
    ended = called(submit, *short, "--then", *long, "--gpus", gpus)
    assert ended.code == 0 and not ended.err
    long.append(f"init_from={tmp_path / 'short'}")
    planned = [line for line in ended.out.splitlines() if line.startswith("plan ")]
    for asked, words, plan in zip(slurm.asked, (short, long), planned, strict=True):
        plain = trained(CHECKOUT / "slurm" / TEMPLATES[gpus], words, tmp_path / "stub")
        assert trained(*_script_and_words(asked), tmp_path / "stub") == plain
        sizes = plain.parallel
        assert f"tensor {sizes.tensor}, context {sizes.context}, pipeline {sizes.pipeline}, " in plan
        assert f"micro-batch {plain.train.micro_batch})" in plan
    layouts = [line.removeprefix("layout     ") for line in ended.out.splitlines() if line.startswith("layout ")]
    of_the_script = ["train.micro_batch=4", "parallel.context=2"] if size == "3b" else []
    assert layouts == [f"{layout}, as {TEMPLATES[gpus]} has it for this recipe" for layout in of_the_script]


def _script_and_words(asked: list[str]) -> tuple[str, list[str]]:
    place = next(number for number, word in enumerate(asked) if word.endswith(".sbatch"))
    return asked[place], asked[place + 1 :]


def test_the_default_run_folder_is_that_of_a_plain_sbatch(slurm, tmp_path, monkeypatch):  # noqa: F811
    words = ["3b+gdn_nope_lh+pretrain_4k", *DATA]
    plain = trained(CHECKOUT / "slurm/train_8xh200.sbatch", words, tmp_path / "stub")
    monkeypatch.chdir(tmp_path)
    assert called(submit, *words).code == 0
    assert (tmp_path / plain.run_dir / "submitted.yaml").is_file()


def test_words_given_win(slurm, tmp_path):  # noqa: F811
    """Over the layout of the recipe's name, and over one that a person wrote into the script for all recipes."""
    script = tmp_path / "mine.sbatch"
    plain = (CHECKOUT / "slurm/train_8xh200.sbatch").read_text()
    script.write_text(
        plain.replace("#layout=(parallel.tensor=2 parallel.sequence=true) #", "layout=(parallel.tensor=2 parallel.sequence=true) #")
    )
    assert script.read_text() != plain
    for name, words in {"script": [], "words": ["parallel.tensor=4", "parallel.context=1"]}.items():
        recipe = ["3b+gdn_nope_lh+pretrain_4k", *DATA, f"run_dir={tmp_path / name}", *words]
        ended = called(submit, *recipe, "--template", script)
        assert ended.code == 0, ended.err
        job = trained(*_script_and_words(slurm.asked[-1]), tmp_path / "stub")
        assert job.parallel.tensor == (4 if words else 2) and job.parallel.sequence
        assert f"(tensor {job.parallel.tensor}, context 1," in ended.out


def test_a_script_that_is_no_template_is_not_run(tmp_path):
    script = tmp_path / "mine.sbatch"
    script.write_text(f"#!/bin/bash\n# without run_job\necho ran >{tmp_path / 'ran'}\nsrun python -m launch train $@\n")
    assert words_of_job(script, ["recipe", "a=b"]).words == ["recipe", "a=b"] and not (tmp_path / "ran").exists()


ENDS = {
    "exit": ("exit 1\n", "line 2, exit 1"),
    "unbound": ('set -u\necho "$NONE"\n', 'line 3, echo "$NONE"'),
    "loop": ("while true; do :; done\n", "line 2, "),
    "no end": ("if false; then\n", "its first line"),
    "in a function": ("no() {\n    exit 3\n}\nno\n", "line 5, no"),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_script_that_does_not_come_to_its_run_job(tmp_path, case, monkeypatch):
    monkeypatch.setattr(layout, "_SECONDS", 1)
    script = tmp_path / "mine.sbatch"
    contents, where = ENDS[case]
    script.write_text(f'#!/bin/bash\n{contents}source slurm/job.sh\nrun_job "$@"\n')
    with pytest.raises(ConfigError) as refused:
        words_of_job(script, ["recipe"])
    [said] = refused.value.problems
    assert said.startswith(f"{script}: tried on this node it ends at {where}") and "SLURM_JOB_ID" in said
    script.write_text(f'#!/bin/bash\nif [[ -n ${{SLURM_JOB_ID:-}} ]]; then\n{contents if case != "no end" else ":"}\nfi\nrun_job "$@"\n')
    assert words_of_job(script, ["recipe"]) == Handed(["recipe"], True)


@pytest.mark.parametrize(
    "before",
    [
        "module load foo || exit 1",
        "source {profile} && module load foo || exit 1",
        "set -eu\nsource {profile} || true\nexport PATH={bin}:$PATH\nml foo\nfalse_here",
        "command -v nvidia-smi; nvidia-smi >/dev/null || exit 3",
    ],
)
def test_words_given_win_behind_commands_of_the_cluster(slurm, tmp_path, before, monkeypatch):  # noqa: F811
    """They count as succeeded, and nothing is run. Paths that were given hold in the folder where the job runs."""
    (tmp_path / "profile").write_text("module() { return 1; }\nml() { return 1; }\n")
    (tmp_path / "bin/false_here").write_text(f"#!{shutil.which('bash')}\necho >{tmp_path}/ran\nexit 1\n")
    (tmp_path / "bin/false_here").chmod(0o755)
    script = tmp_path / "load.sbatch"
    head = before.replace("{profile}", f"{tmp_path}/profile").replace("{bin}", f"{tmp_path}/bin")
    add = 'source slurm/job.sh\nrun_job "$1" train.micro_batch=2 "${@:2}"\n'
    script.write_text(f"#!/bin/bash\n#SBATCH --gres=gpu:8\n{head}\n{add}")
    monkeypatch.chdir(tmp_path)
    for words, size in (["train.micro_batch=4"], 4), ([], 2):
        ended = called(submit, "776m+gdn_nope_lh+pretrain_4k", *DATA, f"run_dir=run{size}", *words, "--template", script)
        assert ended.code == 0 and not ended.err and f"micro-batch {size})" in ended.out
        assert ("train.micro_batch=2, as load.sbatch has it" in ended.out) == (not words)
        copy, handed = _script_and_words(slurm.asked[-1])
        Path(copy).write_text(add)  # on the node the commands are there
        job = trained(copy, handed, tmp_path / "stub")
        assert job.train.micro_batch == size and job.run_dir == f"{tmp_path}/run{size}"
    assert not (tmp_path / "ran").exists()


def test_a_layout_that_depends_on_what_is_not_run(slurm, tmp_path):  # noqa: F811
    script = tmp_path / "mine.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH --gres=gpu:8\nnvidia-smi && layout=(train.micro_batch=2)\nsource slurm/job.sh\n"
        'run_job "$1" "${layout[@]}" "${@:2}"\n'
    )
    words = ["776m+gdn_nope_lh+pretrain_4k", *DATA, f"run_dir={tmp_path / 'run'}"]
    ended = called(submit, *words, "--template", script)
    assert ended.code == 2 and "whether it sets train.micro_batch=2 depends on commands" in ended.errors[0] and not slurm.asked
    assert called(submit, *words, "train.micro_batch=4", "--template", script).code == 0
    assert "train.micro_batch=4" in slurm.asked[0], "whichever way the script takes there"


def test_a_script_that_makes_another_run_of_the_submitted_file(slurm, tmp_path):  # noqa: F811
    script = tmp_path / "mine.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH --gres=gpu:8\nif [[ $1 == *.yaml ]]; then layout=(train.micro_batch=2); fi\nsource slurm/job.sh\n"
        'run_job "$1" "${layout[@]}" "${@:2}"\n'
    )
    ended = called(submit, "776m+gdn_nope_lh+pretrain_4k", *DATA, f"run_dir={tmp_path / 'run'}", "--template", script)
    assert ended.code == 2 and "in the job it adds train.micro_batch=2 to the file submitted.yaml" in ended.errors[0]


def test_what_the_script_added_is_said_where_it_is_refused(slurm, tmp_path):  # noqa: F811
    small = "model.num_layers=4"  # fits one GPU
    short = ["3b+gdn_nope_lh+pretrain_4k", small, *DATA, f"run_dir={tmp_path / 'short'}"]
    long = ["3b+gdn_nope_lh+extend_32k", small, *DATA, f"run_dir={tmp_path / 'long'}"]
    ended = called(submit, *short, "--then", *long, "--", "--gres=gpu:1")
    assert ended.code == 2 and ended.errors == [
        "stage 2, 3b+gdn_nope_lh+extend_32k: parallel: tensor * context * pipeline = 1 * 2 * 1 = 2 must divide the 1 GPU of the job; ask "
        "for a multiple of 2, with --gres=gpu:N and --nodes=N behind --, or lower one of them; parallel.context=2 stands in "
        "train_8xh200.sbatch for this recipe, not among your words; words given win, parallel.context=1 gives the recipe's own"
    ]
    assert called(submit, *short, "--then", *long, "parallel.context=1", "--", "--gres=gpu:1").code == 0
    [said] = called(submit, *long, "parallel.context=2", f"init_from={tmp_path / 'short'}", "--", "--gres=gpu:1").errors
    assert said.startswith("parallel: ") and "sbatch" not in said, "a run that is alone, and the user's own word"


def test_a_setting_of_the_script_that_there_is_not(slurm, tmp_path):  # noqa: F811
    script = tmp_path / "mine.sbatch"
    script.write_text('#!/bin/bash\n#SBATCH --gres=gpu:8\nrun_job "$1" parallel.contxt=2 "${@:2}"\n')
    ended = called(submit, "776m+gdn_nope_lh+pretrain_4k", *DATA, f"run_dir={tmp_path / 'run'}", "--template", script)
    [said] = ended.errors
    assert "parallel.contxt is not a setting" in said and said.endswith(
        "; parallel.contxt=2 stands in mine.sbatch for this recipe, not among your words"
    )
