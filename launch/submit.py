"""python -m launch submit RECIPE [section.key=value ...] [--then RECIPE [section.key=value ...]] ...
                        [--gpus 8 | --gpus 16 | --template FILE] [--dry-run] [-- sbatch options]

Submits a training job to Slurm, on a login node and in seconds: plans the recipe and opens its datasets, so that what would fail is refused
now; copies the code into the run folder, so that the job and its requeues run from what was submitted; and calls sbatch with
slurm/train_8xh200.sbatch (--gpus 16: train_16xh200.sbatch; --template: a batch script of yours), with the settings of slurm/cluster.env and
the options behind --, e.g. -- --time=12:00:00 --partition=h200.

--then adds a stage that starts when the one before is complete, from its parameters (init_from), in a run folder of its own. A stage that
is complete already is passed over. --dry-run says what would be submitted and writes nothing.
"""

import shlex
import sys
from pathlib import Path

from hybrid_megatron.errors import ConfigError, exit_with_code_2
from launch.words import help_if_asked, split_options


def main(words: list[str]) -> None:
    help_if_asked(__doc__, words)
    with exit_with_code_2():
        recipes, options, sbatch_options = _split(words)
        _submit(recipes, options, sbatch_options)


def _submit(recipes: list[list[str]], options: dict[str, str], sbatch_options: list[str]) -> None:
    from hybrid_megatron.code_version import ROOT
    from hybrid_megatron.slurm import stage, submission  # after the words are read: these import torch
    from hybrid_megatron.slurm.template import TEMPLATES, gpus_of

    configs = stage.read_stages(recipes)
    template = Path(options.get("--template") or ROOT / "slurm" / TEMPLATES[_gpus(options, TEMPLATES)])
    gpus = gpus_of(template, sbatch_options)
    waiting = []
    for config, words in zip(configs, recipes):
        plan = stage.check(config, words, gpus)
        stage.check_free(Path(config.run_dir))
        if stage.is_complete(config):
            print(f"complete   {config.name}: all its steps are done, in {config.run_dir}; nothing to submit")
        else:
            waiting.append((config, plan))
    code, job = submission.code_with(template), None
    for config, plan in waiting:
        _describe(plan, gpus)
        if "--dry-run" in options:
            asked = submission.command(config, Path(config.run_dir) / "code" / code.hash, template.name, sbatch_options, job)
            job = "ID"
            print(f"would ask  {shlex.join(asked)}")
            continue
        after, job = job, submission.submit(config, code, template.name, sbatch_options, job)
        print(f"submitted  job {job}" + (f", after job {after} is complete" if after else ""))
        print(f"code       {Path(config.run_dir) / 'code' / code.hash} ({code.version})")
        print(f"watch      python -m launch status {config.run_dir}")
        print(f"           tail -F {Path(config.run_dir) / 'logs' / f'slurm-{job}.out'}")
        print(f"end        python -m launch cancel {config.run_dir}")


def _describe(plan: dict, gpus: int) -> None:
    count = str(gpus)
    sizes = ", ".join(f"{kind} {plan['rank_grid'][count]['layout'][kind]}" for kind in ("tensor", "context", "pipeline", "data"))
    memory, time = plan["memory_gib_per_gpu"][count], plan["time"][count]
    print(f"run        {plan['run_dir']}")
    print(
        f"plan       {plan['recipe']}: {plan['steps']:,} steps on {gpus} GPUs ({sizes}), {memory['peak']:.1f} GiB of each, "
        f"about {time['hours']:.1f} hours on H200s"
    )


def _gpus(options: dict[str, str], templates: dict[int, str]) -> int:
    told = options.get("--gpus", "8")
    if told not in map(str, templates):
        raise ConfigError(
            f"--gpus {told}: there are templates for {' and '.join(map(str, templates))}; give another one with --template FILE"
        )
    return int(told)


def _split(words: list[str]) -> tuple[list[list[str]], dict[str, str], list[str]]:
    """The recipes of the stages, options by name, and what stands behind --."""
    words, _, sbatch_options = _partition(words, "--")
    recipes, options, more = [], {}, True
    while more:
        stage, more, words = _partition(words, "--then")
        recipe, named = split_options("submit", stage, ("--gpus", "--template"), ("--dry-run",))
        recipes.append(recipe)
        options |= named
    if "--gpus" in options and "--template" in options:
        raise ConfigError("--gpus and --template: both name the batch script; leave one out")
    return recipes, options, sbatch_options


def _partition(words: list[str], at: str) -> tuple[list[str], list[str], list[str]]:
    place = words.index(at) if at in words else len(words)
    return words[:place], words[place : place + 1], words[place + 1 :]


if __name__ == "__main__":
    main(sys.argv[1:])
