"""`launch submit` plans and submits the layout that a plain sbatch of the same words trains with."""

import shutil
import subprocess
from pathlib import Path

import pytest

from hybrid_megatron.config import RunConfig, load_recipe
from hybrid_megatron.slurm import stage
from hybrid_megatron.slurm.layout import words_of_job
from hybrid_megatron.slurm.template import TEMPLATES
from launch import submit
from tests.cpu.runs import CHECKOUT
from tests.cpu.test_submit import called, no_slurm, slurm  # noqa: F401

DATA = ("data.train=/data/train", "data.valid=/data/valid")
SIZES = [path.stem for path in sorted((CHECKOUT / "recipes/models").glob("*.yaml")) if path.stem[0].isdigit()]


@pytest.fixture(autouse=True)
def no_data(monkeypatch):
    monkeypatch.setattr(stage, "open_dataset", lambda config, split: None)


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
    of_the_first = ["train.micro_batch=4"] if size == "3b" else []
    told = f", as {TEMPLATES[gpus]} has it for this recipe"
    assert layouts == [f"{layout}{told}" for layout in (*of_the_first, "parallel.context=2")]


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
    script.write_text(f"#!/bin/bash\necho ran >{tmp_path / 'ran'}\nsrun python -m launch train $@\n")
    assert words_of_job(script, ["recipe", "a=b"]) == ["recipe", "a=b"] and not (tmp_path / "ran").exists()


def test_a_template_that_does_not_come_to_its_end(tmp_path):
    script = tmp_path / "mine.sbatch"
    script.write_text("#!/bin/bash\nexit 1\nsource slurm/job.sh\nrun_job $@\n")
    with pytest.warns(UserWarning, match="it does not come to its run_job, so a layout that it sets is not in the plan"):
        assert words_of_job(script, ["recipe"]) == ["recipe"]
