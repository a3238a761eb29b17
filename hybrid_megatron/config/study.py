"""What a study is made of: runs, and evaluations of them."""

from dataclasses import dataclass

from hybrid_megatron.config.fragments import nearest
from hybrid_megatron.errors import ConfigError


@dataclass(frozen=True)
class Run:
    """One training of a study."""

    study: str
    name: str
    """Unique in the study, fit for a file name."""
    words: tuple[str, ...]
    """The recipe and its overrides, as `load_recipe` takes them."""
    init_from: str | None
    """STUDY/RUN of the run whose parameters it starts from."""
    gpus: int
    """Processes it is meant for."""
    note: str | None

    @property
    def run_dir(self) -> str:
        return f"runs/{self.study}/{self.name}"

    def arguments(self) -> list[str]:
        """The words of `python -m launch train`, but for the datasets."""
        start = [] if self.init_from is None else [f"init_from=runs/{self.init_from}"]
        return [*self.words, f"name={self.name}", f"run_dir={self.run_dir}", *start]


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a run's checkpoint."""

    run: str
    """STUDY/RUN."""
    name: str
    settings: tuple[str, ...]
    """Overrides of EvaluationConfig."""

    def arguments(self) -> list[str]:
        """The words of `python -m launch evaluate`, but for data other than the run's own."""
        return [f"runs/{self.run}", f"name={self.name}", *self.settings]


@dataclass(frozen=True)
class Study:
    """The runs and evaluations behind tables and figures."""

    name: str
    purpose: str
    shows: tuple[str, ...]
    """The tables and figures."""
    runs: tuple[Run, ...]
    also: tuple[str, ...]
    """STUDY/RUN of the runs of other studies that belong to the comparison."""
    evaluations: tuple[Evaluation, ...]

    def __getitem__(self, name: str) -> Run:
        """The run of this name. Raises ConfigError if there is none, with the nearest name."""
        for run in self.runs:
            if run.name == name:
                return run
        names = [run.name for run in self.runs]
        raise ConfigError(f"{self.name}:{name}: study {self.name} has no such run{nearest(name, names)}")


def describe(study: Study) -> str:
    """The study as a table for people; for programs, `dataclasses.asdict(study)` is plain data."""
    lines = [f"study      {study.name}", f"purpose    {study.purpose}", *(f"shows      {what}" for what in study.shows), ""]
    rows = [("run", "GPUs", "starts from", "settings of its own")]
    rows += [(run.name, str(run.gpus), run.init_from or "", _own_settings(run)) for run in study.runs]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    if study.also:
        lines += ["", "compared with", *(f"  {key}" for key in study.also)]
    counts: dict[str, int] = {}
    for evaluation in study.evaluations:
        said = f"{evaluation.name}: {' '.join(evaluation.settings) or 'as trained'}"
        counts[said] = counts.get(said, 0) + 1
    if counts:
        lines += ["", "evaluations", *(f"  {count:>4} of {said}" for said, count in counts.items())]
    return "\n".join(lines)


def _own_settings(run: Run) -> str:
    """What its name does not say: the recipe, if that is not the name, and overrides."""
    recipe, *overrides = run.words
    return " ".join([*([] if recipe == run.name else [recipe]), *overrides])
