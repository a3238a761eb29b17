"""python -m launch submit RECIPE [section.key=value ...] [--then RECIPE [section.key=value ...]] ...
                        [--gpus 8 | --gpus 16 | --template FILE] [--dry-run] [-- sbatch options]

Submits a training job to Slurm, on a login node and in seconds: plans the recipe, opens its datasets and compares the parameters of what it
starts from, so that what would fail is refused now; copies the code into the run folder, so that the job and its requeues run from what was
submitted; and calls sbatch with slurm/train_8xh200.sbatch (--gpus 16: train_16xh200.sbatch; --template: a batch script of yours), with the
settings of slurm/cluster.env and the options behind --, e.g. -- --time=12:00:00 --partition=h200. The layout is the one that the script
takes for a recipe of this name, as with a plain sbatch; words given win.

--then adds a stage that starts when the one before is complete, from its parameters (init_from), in a run folder of its own. A stage that
is complete already is passed over. A --dependency behind -- is for the first. --dry-run says what would be submitted and writes nothing.
"""

import shlex
import sys
from pathlib import Path

from hybrid_megatron.command_line import pasted
from hybrid_megatron.errors import ConfigError, RunError, UserError, exit_with_code_2
from hybrid_megatron.quantities import human_hours, plural
from launch.words import help_if_asked, split_options


def main(words: list[str]) -> None:
    help_if_asked(__doc__, words)
    with exit_with_code_2():
        recipes, options, sbatch_options = _split(words)
        _submit(recipes, options, sbatch_options)


def _submit(recipes: list[list[str]], options: dict[str, str], sbatch_options: list[str]) -> None:
    from hybrid_megatron.code_version import ROOT
    from hybrid_megatron.slurm import checks, stage, submission  # after the words are read: these import torch
    from hybrid_megatron.slurm.cluster_env import check_cluster_env
    from hybrid_megatron.slurm.template import TEMPLATES, gpus_of

    template = Path(options.get("--template") or ROOT / "slurm" / TEMPLATES[_gpus(options, TEMPLATES)])
    gpus = gpus_of(template, sbatch_options, check_cluster_env())
    stages = stage.read_stages(recipes, template)
    after_another = any(word.startswith(("-d", "--dependency")) for word in sbatch_options)
    waiting = []
    for number, each in enumerate(stages):
        with each.named():
            plan = checks.check(each, gpus, stages[:number], after_another)
            if checks.is_complete(each.config):
                print(f"complete   {each.config.name}: all its steps are done, in {each.config.run_dir}; nothing to submit")
            else:
                checks.check_place(Path(each.config.run_dir))
                waiting.append((each, plan))
    code, jobs = submission.code_with(template), []
    for each, plan in waiting:
        run_dir, after = Path(each.config.run_dir), jobs[-1] if jobs else None
        _describe(each, plan, gpus, template)
        if "--dry-run" in options:
            jobs.append("ID")
            asked = submission.command(each, run_dir / "code" / code.hash, template.name, sbatch_options, after)
            print(f"would ask  {shlex.join(asked)}")
            continue
        try:
            with each.named():
                jobs.append(submission.submit(each, code, template.name, sbatch_options, after))
        except UserError as error:
            raise RunError(f"{error}{_of_the_rest([each for each, _ in waiting], jobs, options, sbatch_options)}") from None
        print(f"submitted  job {jobs[-1]}" + (f", after job {after} is complete" if after else ""))
        print(f"code       {run_dir / 'code' / code.hash} ({code.version})")
        print(f"watch      {pasted('launch', 'status', run_dir)}")
        print(f"           {shlex.join(['tail', '-F', str(run_dir / 'logs' / f'slurm-{jobs[-1]}.out')])}")
        print(f"end        {pasted('launch', 'cancel', run_dir)}", flush=True)


def _describe(stage, plan: dict, gpus: int, template: Path) -> None:
    count, config = str(gpus), stage.config
    sizes = ", ".join(f"{kind} {plan['rank_grid'][count]['layout'][kind]}" for kind in ("tensor", "context", "pipeline", "data"))
    memory, time = plan["memory_gib_per_gpu"][count], plan["time"][count]
    print(f"run        {plan['run_dir']}")
    if stage.layout:
        print(f"layout     {' '.join(stage.layout)}, as {template.name} has it for this recipe")
    print(
        f"plan       {plan['recipe']}: {plural(plan['steps'], 'step')} on {plural(gpus, 'GPU')} ({sizes}, micro-batch "
        f"{config.train.micro_batch}), {memory['peak']:.1f} GiB of each, estimated at {human_hours(time['hours'])} on H200s"
    )


def _of_the_rest(stages: list, jobs: list[str], options: dict[str, str], sbatch_options: list[str]) -> str:
    """Where some stages of a chain are submitted and the next is refused: which, how to end them, and how to go on."""
    if not jobs:
        return ""
    rest = [word for stage in stages[len(jobs) :] for word in ("--then", *stage.words)][1:]
    told = [word for option in options.items() for word in option if word]
    after = [f"--dependency=afterok:{jobs[-1]}", "--kill-on-invalid-dep=yes"]
    return (
        f"; of this chain {'job' if len(jobs) == 1 else 'jobs'} {', '.join(jobs)} {'is' if len(jobs) == 1 else 'are'} submitted: end with "
        f"{pasted('launch', 'cancel', stages[0].config.run_dir)}, or mend this and go on with "
        f"{pasted('launch', 'submit', *rest, *told, '--', *sbatch_options, *after)}"
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
    if len(recipes) > 1 and not all(recipes):
        raise ConfigError("--then: a recipe must stand before it and behind it; name the stage that follows, or leave --then out")
    if "--gpus" in options and "--template" in options:
        raise ConfigError("--gpus and --template: both name the batch script; leave one out")
    return recipes, options, sbatch_options


def _partition(words: list[str], at: str) -> tuple[list[str], list[str], list[str]]:
    place = words.index(at) if at in words else len(words)
    return words[:place], words[place : place + 1], words[place + 1 :]


if __name__ == "__main__":
    main(sys.argv[1:])
