"""The studies in `recipes/studies` by name, and their runs as STUDY:RUN. How a study is written: study_file.py."""

from functools import cache

from hybrid_megatron.config.fragments import RECIPES, nearest
from hybrid_megatron.config.study import Evaluation, Run, Study, describe
from hybrid_megatron.config.study_file import read_study
from hybrid_megatron.errors import ConfigError

__all__ = ["Evaluation", "Run", "Study", "describe", "find_run", "load_study", "study_names"]


STUDIES = RECIPES / "studies"


def study_names() -> list[str]:
    return sorted(path.stem for path in STUDIES.glob("*.yaml"))


def load_study(name: str) -> Study:
    """Read a study. Raises ConfigError with everything that is wrong with it.

    Fragments, overrides and references to other runs are checked here; the settings of one run together by `load_recipe` and `validate`.
    """
    study = _read(name)
    references = [(f"init_from of {run.name}", run.init_from) for run in study.runs if run.init_from is not None]
    references += [("also", key) for key in study.also]
    references += [("evaluations", evaluation.run) for evaluation in study.evaluations]
    problems = [f"study {name}: {where}: {problem}" for where, key in references for problem in _problems_of(key)]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return study


def find_run(word: str) -> Run:
    """The run that STUDY:RUN names. Raises ConfigError if there is none."""
    study, _, name = word.partition(":")
    return load_study(study)[name]


def _problems_of(key: str) -> list[str]:
    """What is wrong with STUDY/RUN."""
    study, _, name = key.partition("/")
    try:
        _read(study)[name]
    except ConfigError as error:
        return error.problems
    return []


@cache
def _read(name: str) -> Study:
    """A study without a look at others."""
    if name not in study_names():
        raise ConfigError(f"study {name!r} is not known{nearest(name, study_names())}; studies are {', '.join(study_names())}")
    return read_study(STUDIES / f"{name}.yaml")
