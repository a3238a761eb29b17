"""python -m launch plan RECIPE [section.key=value ...] [--gpus 8,16] [--mfu 0.4] [--json] [--plot FILE]
python -m launch plan --study NAME [--mfu 0.4] [--json]

Says what a run will be and take, without a GPU and without its datasets: layers, parameters and FLOPs, schedule, possible sizes of every
kind of parallelism, and on each number of GPUs the groups of ranks, memory, communication, hours, possible layouts and the one to take. A
recipe that breaks rules gets what can be said of it, its mistakes, and exit code 2; one that does not fit in memory is told so, with exit
code 0. --plot draws learning rate and batch over tokens. --study has one line for each run of recipes/studies/NAME.yaml, on the GPUs it is
meant for. Memory is what tensors take, against an H200's; keys of --json: hybrid_megatron/planning/plan.py.
"""

import json
import sys
from pathlib import Path

from hybrid_megatron.config import RunConfig, load_recipe
from hybrid_megatron.errors import ConfigError, exit_with_code_2
from launch.words import help_if_asked, split_options, whole_numbers

_WITH_VALUE = ("--gpus", "--mfu", "--plot", "--study")


def main(words: list[str]) -> None:
    help_if_asked(__doc__, words)
    with exit_with_code_2():
        words, options = split_options("plan", words, _WITH_VALUE, ("--json",), lambda name: _studies() if name == "--study" else "")
        mfu = _mfu(options["--mfu"]) if "--mfu" in options else None
        if "--study" in options:
            _plan_study(options, words, mfu)
        else:
            _plan_recipe(options, words, mfu)


def _plan_recipe(options: dict[str, str], words: list[str], mfu: float | None) -> None:
    gpus, config = _gpus(options.get("--gpus", "8,16")), _recipe(words)
    from hybrid_megatron.planning.plan import all_problems, invalid, make_plan  # after the recipe is read: this imports torch
    from hybrid_megatron.planning.plot import plot_schedule
    from hybrid_megatron.planning.report import report

    plan = make_plan(config, gpus, mfu)
    print(json.dumps(plan, indent=2) if "--json" in options else report(plan), flush=True)
    if "--plot" in options and plan.get("schedule"):
        plot_schedule(config, Path(options["--plot"]))
    if invalid(plan):
        raise ConfigError(all_problems(plan))


def _plan_study(options: dict[str, str], words: list[str], mfu: float | None) -> None:
    if words or {"--gpus", "--plot"} & options.keys():
        raise ConfigError(
            "--study: it plans the study's own runs on the GPUs they are meant for; leave out recipe, overrides, --gpus, --plot"
        )
    from hybrid_megatron.config.studies import load_study
    from hybrid_megatron.planning.plan import invalid, make_plan
    from hybrid_megatron.planning.report import study_report

    study = load_study(options["--study"])
    runs = [{"run": run.name, "gpus": run.gpus} | make_plan(_recipe(run.arguments()), [run.gpus], mfu) for run in study.runs]
    hours = sum(run["time"][str(run["gpus"])]["gpu_hours"] for run in runs if run.get("time", {}).get(str(run["gpus"])))
    result = {"study": study.name, "gpu_hours": hours, "runs": runs}
    print(json.dumps(result, indent=2) if "--json" in options else study_report(result), flush=True)
    if broken := [run["run"] for run in runs if invalid(run)]:
        raise ConfigError(f"study {study.name}: {len(broken)} of {len(runs)} runs break rules: {', '.join(broken)}")


def _recipe(words: list[str]) -> RunConfig:
    """A plan reads no data and no parameters: neither has to be named."""
    return load_recipe(words, beneath={"data": {"train": "unset"}}, above={"init_from": None})


def _studies() -> str:
    from hybrid_megatron.config.studies import study_names

    return f", one of {', '.join(study_names())}"


def _gpus(text: str) -> list[int]:
    return whole_numbers("--gpus", text, "these must be numbers of GPUs, e.g. 8 or 8,16")


def _mfu(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(f"--mfu {text}: it must be a share of the peak, above 0 and at most 1, e.g. 0.4")
    return share


if __name__ == "__main__":
    main(sys.argv[1:])
