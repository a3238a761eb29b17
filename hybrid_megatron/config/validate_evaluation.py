"""Rules between the settings of an evaluation and the run that it evaluates."""

from collections.abc import Iterator

from hybrid_megatron.config.schema import EvaluationConfig, RunConfig
from hybrid_megatron.config.validate import (
    PRECISIONS,
    exchanges,
    layer_problems,
    not_among,
    not_positive,
    pipeline_problems,
    sequence_alone,
    tensor_problems,
    world_problem,
)
from hybrid_megatron.errors import ConfigError
from hybrid_megatron.model.inference import with_inference
from hybrid_megatron.model.pattern import LayerPlan, plan_layers


def validate_evaluation(settings: EvaluationConfig, config: RunConfig, world_size: int) -> LayerPlan:
    """The plan of the model as it is evaluated. Raises ConfigError naming every rule that `settings` break on `world_size` processes.

    `config` is the run's, with the evaluation's layout and precision put in (evaluation/evaluate.py).
    """
    basic = list(_basic(settings))
    if basic:  # the rules below compute with these values
        raise ConfigError(basic)
    problems = [*_lengths(settings), *tensor_problems(config), *pipeline_problems(config)]
    if problem := world_problem(settings.parallel, world_size):
        problems.append(problem)
    plan = plan_layers(config)
    try:
        plan = with_inference(plan, settings.inference, config.train.context)
    except ConfigError as error:
        problems += error.problems
    problems += layer_problems(config, plan)
    problems += _without_effect(settings, config.train.context)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return plan


def _without_effect(settings: EvaluationConfig, trained: int) -> Iterator[str]:
    """Settings of inference that change nothing at any of the lengths."""
    inference, longest = settings.inference, max(settings.lengths)
    for key in ("rope_window", "swla_window"):
        window = getattr(inference, key)
        if window is not None and window >= longest:
            yield f"inference.{key}={window}: no length is above it, the longest is {longest}; lower it, or ask for longer lengths"
    if inference.logit_scale == "log" and longest <= trained:
        yield f"inference.logit_scale=log: it acts beyond the {trained} tokens of training, the longest length is {longest}; set lengths"
    if inference.dynamic_ntk and longest <= trained:
        yield f"inference.dynamic_ntk=true: it acts beyond the {trained} tokens of training, the longest length is {longest}; set lengths"


def _basic(settings: EvaluationConfig) -> Iterator[str]:
    yield from not_positive("", settings)
    yield from not_positive("parallel", settings.parallel)
    precision = () if settings.precision is None else (("precision", settings.precision, PRECISIONS),)
    yield from not_among(*precision, *exchanges(settings.parallel))
    if not settings.lengths or min(settings.lengths) < 1:
        yield f"lengths={settings.lengths}: it must name one length or more, each at least 1 token"
    if settings.name is not None and ("/" in settings.name or settings.name.startswith(".") or not settings.name):
        yield f"name={settings.name}: it names files, so it must not be empty, hold a / or begin with a dot"


def _lengths(settings: EvaluationConfig) -> Iterator[str]:
    parallel = settings.parallel
    yield from sequence_alone(parallel)
    if parallel.context > 1 and (odd := [length for length in settings.lengths if length % (2 * parallel.context)]):
        yield (
            f"parallel.context={parallel.context}: each rank takes two chunks, so every length must be a multiple of "
            f"{2 * parallel.context}, and {odd[0]} of lengths={settings.lengths} is not"
        )
    whole = parallel.context * parallel.tensor
    if parallel.sequence and (odd := [length for length in settings.lengths if length % whole]):
        yield (
            f"parallel.sequence=true: every length must be a multiple of parallel.context * parallel.tensor = {whole}, and {odd[0]} of "
            f"lengths={settings.lengths} is not"
        )
