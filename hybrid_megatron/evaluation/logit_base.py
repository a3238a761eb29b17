"""The base a of HypeNet's logit scale ln(t + a) / ln a, chosen after training by the loss on held-out documents.

Source: arXiv 2601.22156, equation 11 and what follows it.
"""

import dataclasses
import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path

from hybrid_megatron.config.schema import EvaluationConfig, LogitBaseConfig
from hybrid_megatron.errors import ConfigError, RunError
from hybrid_megatron.evaluation.evaluate import LONGEST, config_of_run, evaluate_each
from hybrid_megatron.evaluation.results import evaluation_name
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.parallel.state import global_rank


@dataclass
class LogitBaseChoice:
    """Written as it stands; every value is plain data."""

    run: str
    checkpoint: str
    length: int
    """Tokens a sample."""
    tokens: int
    """Predicted by each candidate."""
    unscaled_loss: float
    """Nats a token without a logit scale."""
    losses: list[dict]
    """By candidate: base, loss."""
    best: float
    """The base of the lowest loss."""


def choose_logit_base(run_dir: Path, settings: LogitBaseConfig, *, silent: bool = False) -> LogitBaseChoice:
    """Evaluate a checkpoint at the longest length without a scale and with each candidate, and write the choice to
    OUTPUT/logit_base.CHECKPOINT.json.

    Called by every process. Raises a UserError for what the user can mend. `silent`: nothing is printed.
    """
    candidates = _candidates(settings)
    config = config_of_run(run_dir)
    if not any(group.mixer == "attention" and group.position == "nope" for layer in plan_layers(config) for group in layer.groups):
        raise ConfigError(f"{run_dir}: it has no attention without position, and the base is that of its logit scale; choose another run")
    speaks = global_rank() == 0 and not silent
    asked = _one_length(settings, run_dir)
    losses = {}
    for report in evaluate_each(run_dir, [_with_base(asked, base) for base in (None, *candidates)], silent=True):
        measured, base = report.lengths[0], report.settings["inference"]["logit_scale_value"]
        losses[base] = measured["loss"]
        if speaks:
            print(_line(measured, base), flush=True)
    unscaled = losses.pop(None)
    best = min(losses, key=losses.get)
    choice = LogitBaseChoice(
        run=str(run_dir),
        checkpoint=report.checkpoint["name"],
        length=measured["length"],
        tokens=measured["tokens"],
        unscaled_loss=unscaled,
        losses=[{"base": base, "loss": loss} for base, loss in losses.items()],
        best=best,
    )
    if global_rank() == 0:
        path = _write(Path(settings.output or run_dir / "evaluation"), choice)
        if speaks:
            print(f"\nbest       {best:g}: loss {losses[best]:.4f}, without a scale {unscaled:.4f}\nwritten    {path}", flush=True)
    if len(losses) > 1 and best in (min(losses), max(losses)):
        warnings.warn(
            f"candidates: the best, {best:g}, is the {'least' if best == min(losses) else 'largest'} of them; try others beyond it"
        )
    return choice


def _one_length(settings: LogitBaseConfig, run_dir: Path) -> EvaluationConfig:
    """The settings of an evaluation at the longest length alone."""
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(EvaluationConfig)}
    lengths = [LONGEST * config_of_run(run_dir).train.context] if settings.lengths is None else settings.lengths
    return EvaluationConfig(**values | {"lengths": [max(lengths)] if lengths else lengths})


def _with_base(asked: EvaluationConfig, base: float | None) -> EvaluationConfig:
    """With the scale of this base, or without one; a name given stands before that of the scale."""
    scale = {} if base is None else {"logit_scale": "hype", "logit_scale_value": base}
    scaled = dataclasses.replace(asked, inference=dataclasses.replace(asked.inference, **scale))
    prefix = "" if asked.name is None else f"{asked.name},"
    return dataclasses.replace(scaled, name=prefix + evaluation_name(scaled))


def _candidates(settings: LogitBaseConfig) -> list[float]:
    """In order, each once."""
    if not settings.candidates or not all(1 < base < math.inf for base in settings.candidates):
        said = ", ".join(f"{base:g}" for base in settings.candidates)
        raise ConfigError(f"candidates=[{said}]: it must name one base or more, each more than 1, e.g. [100,300,900]")
    if settings.inference.logit_scale != "none" or settings.inference.logit_scale_value is not None:
        raise ConfigError(
            f"inference.logit_scale={settings.inference.logit_scale}: the candidates are the scales tried; leave it out, and its value"
        )
    return sorted(set(settings.candidates))


def _line(measured: dict, base: float | None) -> str:
    head = "" if base is not None else f"length     {measured['length']:,}\ntokens     {measured['tokens']:,}\n\n{'base':>10} {'loss':>9}\n"
    return f"{head}{'none' if base is None else f'{base:g}':>10} {measured['loss']:>9.4f}"


def _write(folder: Path, choice: LogitBaseChoice) -> Path:
    path = folder / f"logit_base.{choice.checkpoint}.json"
    try:
        path.write_text(as_json(choice) + "\n")
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); mend that, or give another folder with output=PATH") from None
    return path


def as_json(choice: LogitBaseChoice) -> str:
    return json.dumps(dataclasses.asdict(choice), indent=1, allow_nan=False)
