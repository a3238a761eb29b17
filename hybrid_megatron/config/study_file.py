"""`recipes/studies/NAME.yaml` -> Study: combinations of fragments, multiplied out.

    purpose: Do hybrids gain from training at 32K?
    shows: [Table 11]
    axes:
      size: [376m, 776m]
      pattern: [swa_nope_lh, gdn_nope_lh]
      lr: [{lr_1e-4: optimizer.peak_lr=1e-4}, {lr_2e-4: optimizer.peak_lr=2e-4}]
    runs:
      - recipe: <size>+<pattern>+pretrain_4k
      - recipe: <size>+<pattern>+extend_32k+<lr>
        init_from: <size>+<pattern>+pretrain_4k      # a run further up, or STUDY/RUN of another study
    evaluations:
      - runs: <size>+<pattern>+pretrain_4k
        settings: {plain: [], log: inference.logit_scale=log}

<axis> stands for each value of an axis in turn: a part of a recipe, or a name for overrides, as of lr. A run is named by its recipe as
written there, or by `name`, and lies in runs/STUDY/RUN. `also` names runs of other studies that belong to the comparison: nothing is
trained twice. `gpus` maps words of recipes to the GPUs that runs with them are meant for, 8 if none says otherwise; `layouts` maps words
joined by + to overrides of the runs that have all of them; `lengths` are those of all evaluations. An entry of runs, also or evaluations
may have `axes` of its own, over the study's, and a run a `note`.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from hybrid_megatron.config.fragments import find_fragment, nearest, read_yaml
from hybrid_megatron.config.schema import EvaluationConfig, RunConfig
from hybrid_megatron.config.setting_types import override_problems
from hybrid_megatron.config.study import Evaluation, Run, Study
from hybrid_megatron.errors import ConfigError

_GPUS = 8
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_AXIS = re.compile(r"<([^<>]*)>")
# key: (type, whether it is needed)
_STUDY = {
    "purpose": (str, True),
    "shows": (list, True),
    "axes": (dict, False),
    "gpus": (dict, False),
    "layouts": (dict, False),
    "lengths": (list, False),
    "runs": (list, True),
    "also": (list, False),
    "evaluations": (list, False),
}
_RUNS = {"recipe": (str, True), "name": (str, False), "axes": (dict, False), "init_from": (str, False), "note": (str, False)}
_ALSO = {"runs": (str, True), "axes": (dict, False)}
_EVALUATIONS = {"runs": (str, True), "axes": (dict, False), "settings": (dict, True)}
_TYPES = {str: "a text", list: "a list", dict: "a mapping"}


def read_study(path: Path) -> Study:
    """Raises ConfigError with everything that is wrong in the file. Runs of other studies are not looked up."""
    return _File(path.stem, read_yaml(path)).study()


class _File:
    """One file while it is read; what is wrong with it is gathered in `problems`."""

    def __init__(self, name: str, tree: dict):
        self.name, self.tree = name, tree
        self.problems: list[str] = []
        self.used_axes: set[str] = set()
        self.used_words: set[str] = set()

    def study(self) -> Study:
        self._check_keys("", self.tree, _STUDY)
        for key, known in (("runs", _RUNS), ("also", _ALSO), ("evaluations", _EVALUATIONS)):
            for i, entry in enumerate(self.tree.get(key, []) if not self.problems else []):
                self._check_keys(f"{key}[{i}]", entry, known)
        self._stop_if_wrong()
        self.axes = self._read_axes("axes", self.tree.get("axes", {}))
        runs = tuple(self._runs())
        also = tuple(self._references("also"))
        evaluations = tuple(self._evaluations())
        self._check_use()
        self._stop_if_wrong()
        return Study(self.name, self.tree["purpose"], tuple(map(str, self.tree["shows"])), runs, also, evaluations)

    def _check_keys(self, where: str, entry, known: dict[str, tuple[type, bool]]) -> None:
        if not isinstance(entry, dict):
            self._wrong(f"{where}={entry!r}: this is a mapping with keys {', '.join(known)}")
            return
        for key, value in entry.items():
            path = f"{where}.{key}".lstrip(".")
            if key not in known:
                self._wrong(f"{path} is not a key of a study{nearest(str(key), known) or '; here are ' + ', '.join(known)}")
            elif not isinstance(value, known[key][0]) or not value:
                self._wrong(f"{path}={value!r}: this must be {_TYPES[known[key][0]]}, and not empty")
        for key, (_, needed) in known.items():
            if needed and key not in entry:
                self._wrong(f"{where}.{key} is not set".lstrip("."))

    def _read_axes(self, where: str, tree: dict) -> dict[str, dict[str, list[str]]]:
        """Axis to its values: how each is written in a name, and its overrides, if it stands for some."""
        axes = {}
        for axis, listed in tree.items():
            values: dict[str, list[str]] = {}
            for value in listed if isinstance(listed, list) else [None]:
                if isinstance(value, str):
                    values[value] = []
                elif isinstance(value, dict) and len(value) == 1:
                    [(said, overrides)] = value.items()
                    values[str(said)] = _as_list(overrides)
                    self._wrong(*(f"{where}.{axis}: {problem}" for problem in override_problems(RunConfig, values[str(said)])))
                else:
                    self._wrong(f"{where}.{axis}={listed!r}: this is a list of texts, or of {{name: overrides}}")
            axes[axis] = values
        return axes

    def _combinations(self, where: str, entry: dict, text: str) -> Iterator[dict[str, tuple[str, list[str]]]]:
        """For each combination of the axes in `text`: axis to how its value is written, and its overrides."""
        axes = self.axes | self._read_axes(f"{where}.axes", entry.get("axes", {}))
        asked = list(dict.fromkeys(_AXIS.findall(text)))
        self.used_axes.update(asked)
        for axis in entry.get("axes", {}).keys() - set(asked):
            self._wrong(f"{where}.axes.{axis}: <{axis}> does not stand in {text!r}")
        if unknown := [axis for axis in asked if axis not in axes]:
            self._wrong(*(f"{where}: <{axis}> is no axis{nearest(axis, axes) or '; axes are ' + ', '.join(axes)}" for axis in unknown))
            return
        for values in itertools.product(*(axes[axis].items() for axis in asked)):
            yield dict(zip(asked, values))

    def _runs(self) -> Iterator[Run]:
        names: list[str] = []
        for i, entry in enumerate(self.tree["runs"]):
            where = f"runs[{i}]"
            for values in self._combinations(where, entry, entry["recipe"]):
                name = self._written(where, entry.get("name", entry["recipe"]), values)
                recipe = self._recipe(where, entry["recipe"], values)
                overrides = self._layout(recipe) + [word for _, words in values.values() for word in words]
                start = self._written(where, entry["init_from"], values) if "init_from" in entry else None
                if start is not None and "/" not in start:
                    if start not in names:
                        self._wrong(f"{where}.init_from={start}: no run further up has that name{nearest(start, names)}")
                    start = f"{self.name}/{start}"
                if name in names:
                    self._wrong(f"{where}: two runs are named {name}; tell them apart by `name`")
                if not _NAME.fullmatch(name):
                    self._wrong(f"{where}: a run cannot be named {name!r}; use letters, digits and _ . + -, a letter or digit first")
                names.append(name)
                self.used_words.update(recipe)
                yield Run(self.name, name, ("+".join(recipe), *overrides), start, self._gpus(recipe), entry.get("note"))

    def _recipe(self, where: str, text: str, values: dict[str, tuple[str, list[str]]]) -> list[str]:
        """The words of the recipe, without those that stand for overrides."""
        words = []
        for word in text.split("+"):
            axis = _AXIS.fullmatch(word)
            if axis and values[axis[1]][1]:
                continue
            words.append(self._written(where, word, values))
            try:
                find_fragment(words[-1])
            except ConfigError as error:
                self._wrong(*(f"{where}: {problem}" for problem in error.problems))
        return words

    def _gpus(self, recipe: list[str]) -> int:
        return next((count for word, count in self.tree.get("gpus", {}).items() if word in recipe), _GPUS)

    def _layout(self, recipe: list[str]) -> list[str]:
        layouts = self.tree.get("layouts", {}).items()
        return [word for words, overrides in layouts if set(words.split("+")) <= set(recipe) for word in _as_list(overrides)]

    def _references(self, key: str) -> Iterator[str]:
        """STUDY/RUN of each combination of each entry."""
        for i, entry in enumerate(self.tree.get(key, [])):
            yield from self._named(f"{key}[{i}]", entry)

    def _named(self, where: str, entry: dict) -> Iterator[str]:
        for values in self._combinations(where, entry, entry["runs"]):
            name = self._written(where, entry["runs"], values)
            yield name if "/" in name else f"{self.name}/{name}"

    def _evaluations(self) -> Iterator[Evaluation]:
        lengths = self.tree.get("lengths")
        same = [f"lengths=[{','.join(map(str, lengths))}]"] if lengths else []
        for i, entry in enumerate(self.tree.get("evaluations", [])):
            where = f"evaluations[{i}]"
            settings = {str(name): (*same, *_as_list(words)) for name, words in entry["settings"].items()}
            for name, words in settings.items():
                self._wrong(*(f"{where}.settings.{name}: {problem}" for problem in override_problems(EvaluationConfig, list(words))))
            for run in self._named(where, entry):
                yield from (Evaluation(run, name, words) for name, words in settings.items())

    def _written(self, where: str, text: str, values: dict[str, tuple[str, list[str]]]) -> str:
        """`text` with the axes filled in."""
        if unknown := [axis for axis in _AXIS.findall(text) if axis not in values]:
            self._wrong(f"{where}: {text!r} has <{unknown[0]}>, which the recipe has not")
            return text
        return _AXIS.sub(lambda axis: values[axis[1]][0], text)

    def _check_use(self) -> None:
        """Nothing may stand in the file without effect."""
        for axis in self.axes.keys() - self.used_axes:
            self._wrong(f"axes.{axis}: nothing uses it; write <{axis}> where it belongs, or remove it")
        for word, count in self.tree.get("gpus", {}).items():
            if word not in self.used_words:
                self._wrong(f"gpus.{word}: no recipe has this word{nearest(word, self.used_words)}")
            if not isinstance(count, int) or count < 1:
                self._wrong(f"gpus.{word}={count}: this must be a number of GPUs")
        for words, overrides in self.tree.get("layouts", {}).items():
            if unused := [word for word in words.split("+") if word not in self.used_words]:
                self._wrong(f"layouts.{words}: no recipe has the word {unused[0]}{nearest(unused[0], self.used_words)}")
            self._wrong(*(f"layouts.{words}: {problem}" for problem in override_problems(RunConfig, _as_list(overrides))))

    def _wrong(self, *problems: str) -> None:
        self.problems += [f"study {self.name}: {problem}" for problem in problems]

    def _stop_if_wrong(self) -> None:
        if self.problems:
            raise ConfigError(list(dict.fromkeys(self.problems)))


def _as_list(words: str | list[str]) -> list[str]:
    return words if isinstance(words, list) else [words]
