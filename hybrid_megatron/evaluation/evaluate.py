"""The path of an evaluation, from a run folder and settings to results in files."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

from hybrid_megatron import platform
from hybrid_megatron.checkpoint.load import load_weights
from hybrid_megatron.checkpoint.store import CheckpointStore, Progress
from hybrid_megatron.config import EvaluationConfig, RunConfig, load_recipe
from hybrid_megatron.config.validate_evaluation import validate_evaluation
from hybrid_megatron.data import open_tokens
from hybrid_megatron.errors import CheckpointError, ConfigError, RunError
from hybrid_megatron.evaluation.held_out import HeldOut, held_out
from hybrid_megatron.evaluation.loss_by_position import LossByPosition, measure
from hybrid_megatron.evaluation.report import Narrator, Report
from hybrid_megatron.evaluation.results import evaluation_name, prepare_folder, write_results
from hybrid_megatron.model.hybrid_model import HybridModel, build_chunks
from hybrid_megatron.model.kernels import check_kernels
from hybrid_megatron.model.pattern import LayerPlan
from hybrid_megatron.parallel import ParallelState, start
from hybrid_megatron.parallel.state import global_rank, world_size

LONGEST = 16
"""In training lengths: the longest length that is measured unless others are asked for."""
_MULTIPLES = (1, 2, 4, 8, LONGEST)
"""Of the training length: the lengths that are measured unless others are asked for."""


def evaluate(run_dir: Path, settings: EvaluationConfig, *, silent: bool = False) -> Report:
    """Measure a checkpoint of `run_dir` at every length and write the results to `settings.output`.

    Called by every process. Raises a UserError for what the user can mend, on every process; before any process group exists where that
    is possible. `silent`: nothing is printed.
    """
    [report] = evaluate_each(run_dir, [settings], silent=silent)
    return report


def evaluate_each(run_dir: Path, alternatives: list[EvaluationConfig], *, silent: bool = False) -> Iterator[Report]:
    """As `evaluate`, for settings that differ in `inference` and `name` alone: one checkpoint, the same tokens, one start of processes."""
    trained = config_of_run(run_dir)
    alternatives = [_filled(settings, trained, run_dir) for settings in alternatives]
    settings = alternatives[0]
    config = dataclasses.replace(
        trained, parallel=settings.parallel, train=dataclasses.replace(trained.train, precision=settings.precision, recompute="none")
    )
    plans = [validate_evaluation(each, config, world_size()) for each in alternatives]
    platform.select_device()
    checkpoint = _checkpoint(run_dir, settings.checkpoint)
    stream = open_tokens(config, f"data={settings.data}", Path(settings.data))
    data = held_out(stream, max(settings.lengths), settings.tokens, settings.whole_documents, config.data.document_mask)
    narrator = Narrator(speaks=global_rank() == 0 and not silent)
    with start(config.parallel, config.seed) as state:
        checkpoint = state.from_rank_0(checkpoint)
        for each, plan in zip(alternatives, plans):
            yield _run(run_dir, config, each, plan, checkpoint, data, state, narrator)


def _run(
    run_dir: Path,
    config: RunConfig,
    settings: EvaluationConfig,
    plan: LayerPlan,
    checkpoint: Path,
    data: HeldOut,
    state: ParallelState,
    narrator: Narrator,
) -> Report:
    folder = Path(settings.output) / checkpoint.name
    with state.together():
        if state.rank == 0:
            prepare_folder(folder)
        check_kernels(config, plan)
    model, progress = _load(config, plan, checkpoint, state)
    report = Report.of(run_dir, config, settings, plan, checkpoint, progress, data, state)
    narrator.begin(report, data.samples(data.longest) * data.longest, data.longest)
    for length in settings.lengths:
        result = measure(model, data, length, _micro_batch(settings, data, length, state), state)
        _check_finite(result)
        report.add(result, config.train.context)
        narrator.measured(report)
    with state.together():
        if state.rank == 0:
            narrator.end(write_results(folder, report))
    return report


def config_of_run(run_dir: Path) -> RunConfig:
    """The recipe of a run folder. Raises RunError if there is none."""
    file = run_dir / "config.yaml"
    if not file.is_file():
        what = "it has no config.yaml" if run_dir.is_dir() else "there is no such folder"
        raise RunError(f"{run_dir}: {what}; give the folder of a run that `python -m launch train` made")
    return load_recipe([str(file)])


def _filled(settings: EvaluationConfig, config: RunConfig, run_dir: Path) -> EvaluationConfig:
    """The settings with what is null put in from the run, lengths in order."""
    if settings.data is None and config.data.valid is None:
        raise ConfigError("data is not set, and the run has no data.valid: give held-out tokens with data=PREFIX")
    context = config.train.context
    lengths = settings.lengths if settings.lengths is not None else [multiple * context for multiple in _MULTIPLES]
    return dataclasses.replace(
        settings,
        data=settings.data or config.data.valid,
        lengths=sorted(set(lengths)),
        precision=settings.precision or config.train.precision,
        name=evaluation_name(settings) if settings.name is None else settings.name,
        output=settings.output or str(run_dir / "evaluation"),
    )


def _checkpoint(run_dir: Path, name: str | None) -> Path:
    store = CheckpointStore(run_dir)
    held = [path.name for path in store.complete()]
    if name is None:
        if not held:
            raise CheckpointError(f"{run_dir}: it has no complete checkpoint yet; train on until its first one")
        return store.path / held[-1]
    path = store.path / (f"step_{int(name):08}" if name.isascii() and name.isdigit() else name)
    if Path(name).name != name or path.suffix == ".partial" or not path.is_dir():
        raise CheckpointError(f"checkpoint={name}: {store.path} has no such checkpoint; it has {', '.join(held) or 'none'}")
    return path


def _load(config: RunConfig, plan: LayerPlan, checkpoint: Path, state: ParallelState) -> tuple[list[HybridModel], Progress]:
    """This rank's chunks with the checkpoint's parameters, for prediction alone."""
    model = build_chunks(config, plan, state)
    others = [path.name for path in CheckpointStore(checkpoint.parents[1]).complete() if path != checkpoint]
    then = f"give another with checkpoint=, of {', '.join(others)}" if others else "there is no other in the run folder"
    progress = load_weights(checkpoint, model, state, then)
    for chunk in model:
        chunk.eval()
        chunk.requires_grad_(False)
    return model, progress


def _micro_batch(settings: EvaluationConfig, data: HeldOut, length: int, state: ParallelState) -> int:
    """As many samples as have the tokens of `micro_batch` samples of the longest length, and not more than a rank has."""
    return min(settings.micro_batch * data.longest // length, -(-data.samples(length) // state.data))


def _check_finite(result: LossByPosition) -> None:
    if math.isfinite(result.perplexity):
        return
    wrong = (~result.sums.isfinite()).nonzero()
    where = f"from position {int(wrong[0])} on it is not a number" if len(wrong) else f"it is {result.loss:.4g} nats"
    raise RunError(
        f"lengths: the loss at {result.length} tokens cannot be used, {where}; set lengths to shorter ones, or precision=fp32 if it is bf16"
    )
