"""The path of a run, from a valid recipe to a finished run folder."""

import contextlib
import math
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hybrid_megatron import platform
from hybrid_megatron.checkpoint.integrity import check_hashes
from hybrid_megatron.checkpoint.save_load import checkpoint_bytes, load_checkpoint, save_checkpoint
from hybrid_megatron.checkpoint.store import CheckpointStore, Progress, checkpoint_at, read_progress
from hybrid_megatron.config.megatron import parameter_dtype
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.config.validate import validate
from hybrid_megatron.data import Dataset, open_dataset
from hybrid_megatron.errors import CheckpointError, RunError
from hybrid_megatron.model.accounting import Accounts, account
from hybrid_megatron.model.kernels import check_kernels
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.parallel import ParallelState, start
from hybrid_megatron.parallel.state import global_rank, world_size
from hybrid_megatron.training.build import Trainer, build_trainer
from hybrid_megatron.training.console import Console
from hybrid_megatron.training.optimizer import set_hyperparameters
from hybrid_megatron.training.plot import plot_losses
from hybrid_megatron.training.run_facts import run_facts
from hybrid_megatron.training.run_folder import RunFolder, check_same_run, open_run_folder
from hybrid_megatron.training.schedule import learning_rate
from hybrid_megatron.training.signals import StopRequest, stop_on_signals
from hybrid_megatron.training.stability import Decision, Stability, resume_stability
from hybrid_megatron.training.step import StepResult, train_step, validation_loss
from hybrid_megatron.training.tracking import Tracker

_FAILED = 1 << 20
"""Told to all ranks in place of a signal's number when rank 0 cannot write its metrics."""


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended."""

    run_dir: Path
    step: int
    """Steps done in all."""
    complete: bool
    stopped_by: str | None = None
    """The signal that stopped it, if one did."""


def train(config: RunConfig) -> Outcome:
    """Train a recipe to its token budget, from the newest checkpoint in its run folder if there is one.

    Called by every process. Raises a UserError for what the user can mend, on every process; before any process group exists where
    that is possible.
    """
    validate(config, world_size())
    platform.select_device()
    check_same_run(config)
    train_data = open_dataset(config, "train")
    valid_data = open_dataset(config, "valid") if config.data.valid is not None else None
    if valid_data is not None and config.validation.samples > len(valid_data):
        warnings.warn(
            f"validation.samples={config.validation.samples}: data.valid holds {len(valid_data)} samples, and all of them are taken"
        )
    if config.longce.enabled and config.longce.window + config.longce.stride == config.train.context:
        warnings.warn(
            f"longce.stride={config.longce.stride}: the first short context is the whole of train.context={config.train.context}, so there "
            "is no shorter one and every token weighs 1"
        )
    store = CheckpointStore(config.run_dir)
    console = Console(config, speaks=global_rank() == 0)
    newest = _newest_of(store, train_data)
    init_from = None
    if newest is None and config.init_from is not None:
        with _named_init_from():
            init_from = checkpoint_at(Path(config.init_from))
    if newest is not None and newest[1].step >= config.num_steps:
        if global_rank() == 0:
            store.tidy(config.checkpoint.keep_last)
            check_hashes(newest[0])  # said to be complete, so it must be whole
        console.already_complete(config.num_steps)
        return Outcome(Path(config.run_dir), config.num_steps, complete=True)
    with start(config.parallel, config.seed) as state, open_run_folder(config, state) as folder, stop_on_signals() as stop:
        return _run(config, state, folder, store, train_data, valid_data, console, stop, init_from)


def _run(
    config: RunConfig,
    state: ParallelState,
    folder: RunFolder | None,
    store: CheckpointStore,
    train_data: Dataset,
    valid_data: Dataset | None,
    console: Console,
    stop: StopRequest,
    init_from: Path | None,
) -> Outcome:
    accounts = account(config, plan_layers(config))
    console.describe(state, accounts)
    with state.together():
        check_kernels(config, plan_layers(config))
    newest, init_from = state.from_rank_0((store.newest(), init_from))  # a shared file system may show the others an older state
    with _named_init_from():
        trainer = build_trainer(config, state, train_data, valid_data, None if newest else init_from)
    done = 0
    if newest is not None:
        progress = load_checkpoint(newest, trainer.model, trainer.optimizer, state)
        console.resumed(newest, progress)
        done = progress.step
    elif trainer.origin is not None:
        console.initialised(init_from, trainer.origin)
    tracker = None
    with state.together():
        if folder is not None:
            folder.record(config)
            store.tidy()
            if trainer.origin is not None:
                folder.event("init_from", checkpoint=str(init_from.resolve()), step=trainer.origin.step, tokens=trainer.origin.tokens)
            folder.event("start", step=done, layout=state.layout, world_size=state.world_size, device=platform.device_name())
            tracker = Tracker(config, folder, done, run_facts(state, accounts, folder))
    stability = resume_stability(config, state, folder, done)
    try:
        outcome = _steps(trainer, accounts, store, folder, tracker, stability, console, stop, done)
    except BaseException as error:
        if tracker is not None:
            folder.event("failed", error=str(error).splitlines()[0] if str(error) else type(error).__name__)
            tracker.close(exit_code=1)
        raise
    if tracker is not None:
        tracker.close(exit_code=0)
        console.finish(outcome.step, outcome.stopped_by, _plot(folder), tracker.wandb.sync_command)
    return outcome


def _steps(
    trainer: Trainer,
    accounts: Accounts,
    store: CheckpointStore,
    folder: RunFolder | None,
    tracker: Tracker | None,
    stability: Stability,
    console: Console,
    stop: StopRequest,
    done: int,
) -> Outcome:
    """The loop: step, measure, log, save, until the budget is spent or someone asks to stop."""
    config, state = trainer.config, trainer.state
    while done < config.num_steps:
        began = time.perf_counter()
        lr = learning_rate(config, done)
        set_hyperparameters(trainer.optimizer, lr, config.optimizer.weight_decay)
        result, decision = None, stability.leave_out(done + 1)
        if decision is None:
            result = train_step(config, trainer.model, trainer.optimizer, trainer.train_stream, done, state, stability.judge)
            decision = result.decision
        _tell(folder, console, done + 1, decision)
        if decision.stop is not None:
            advice = f"; [{done + 1}, {done + 1}] added to stability.skip_steps leaves this batch out"
            raise _diverged(trainer, accounts, store, done, f"step {done + 1}: {decision.stop}", advice)
        platform.synchronize()
        done += 1
        metrics = _metrics(config, state, accounts, done, lr, result, time.perf_counter() - began) | decision.metrics

        last = done == config.num_steps
        if trainer.valid_stream is not None and (last or done % config.validation.interval_steps == 0):
            measured = validation_loss(config, trainer.model, trainer.valid_stream, state)
            if not math.isfinite(measured):
                raise _diverged(trainer, accounts, store, done, f"step {done}: the validation loss is {measured}")
            metrics["validation_loss"] = measured
        failure = _log(tracker, metrics)
        console.step(metrics)
        signal_number = state.highest(_FAILED if failure else stop.number)
        if signal_number == _FAILED:
            with state.together():
                if failure:
                    raise failure
        if last or signal_number or done % config.checkpoint.interval_steps == 0:
            if tracker is not None:
                tracker.make_durable()
            _save(trainer, accounts, store, folder, done)
        if signal_number and not last:
            name = signal.Signals(signal_number).name
            if folder is not None:
                folder.event("stopped", step=done, signal=name)
            return Outcome(Path(config.run_dir), done, complete=False, stopped_by=name)
    if folder is not None:
        folder.event("complete", step=done)
    return Outcome(Path(config.run_dir), done, complete=True)


def _tell(folder: RunFolder | None, console: Console, step: int, decision: Decision) -> None:
    """Events and printed lines of what was found; a stop is said by the error that follows."""
    if folder is None:
        return
    for finding in decision.findings:
        folder.event(finding.kind, step=step, action=finding.action, **finding.facts)
        if finding.action != "stop":
            console.found(step, finding.sentence, finding.action)


def _log(tracker: Tracker | None, metrics: dict[str, float]) -> RunError | None:
    """Log on rank 0; a failure is returned, to be told to the other ranks with the signals."""
    try:
        if tracker is not None:
            tracker.log(metrics)
    except RunError as error:
        return error
    return None


def _metrics(
    config: RunConfig, state: ParallelState, accounts: Accounts, done: int, lr: float, result: StepResult | None, seconds: float
) -> dict[str, float]:
    """One line of metrics.jsonl, by the names of the field; mfu only where the device's peak is known.

    A step that was left out (None) has what was not computed, losses, norm and speed, not at all, and neither has any other a value that is
    NaN or infinite: JSON has no such numbers.
    """
    if result is None:
        return {"step": done, "tokens": config.batch_plan.tokens(done), "lr": lr, "step_seconds": seconds}
    rate = config.batch_plan.batch_tokens(done - 1) / seconds / state.world_size
    metrics = {
        "step": done,
        "tokens": config.batch_plan.tokens(done),
        "loss": result.losses.loss,
        "lm_loss": result.losses.lm_loss,
        **result.losses.longce,
        "grad_norm": result.grad_norm,
        "lr": lr,
        "tokens_per_second_per_gpu": rate,
        "model_tflops_per_gpu": rate * accounts.flops_per_token / 1e12,
        "peak_memory_gib": platform.peak_memory_gib(),
        "step_seconds": seconds,
        "data_seconds": result.data_seconds,
    }
    peak = platform.peak_flops()
    if peak is not None:
        metrics["mfu"] = rate * accounts.flops_per_token / peak
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _newest_of(store: CheckpointStore, data: Dataset) -> tuple[Path, Progress] | None:
    """The newest checkpoint and how far it is. Raises CheckpointError if it is unreadable or was trained on other data."""
    newest = store.newest()
    if newest is None:
        return None
    progress = read_progress(newest)
    if progress.data != data.fingerprint:
        raise CheckpointError(
            f"data.train={data.prefix}: {newest} was trained on other data (fingerprint {progress.data[:12]}, "
            f"this is {data.fingerprint[:12]}); resume with the same dataset, or give another run_dir"
        )
    return newest, progress


@contextlib.contextmanager
def _named_init_from() -> Iterator[None]:
    """An error about the checkpoint that a fresh run starts from names the setting."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"init_from={error}") from None


def _save(
    trainer: Trainer, accounts: Accounts, store: CheckpointStore, folder: RunFolder | None, done: int, name: str | None = None
) -> Path:
    config = trainer.config
    began = time.perf_counter()
    path = save_checkpoint(
        store,
        name or f"step_{done:08d}",
        trainer.model,
        trainer.optimizer,
        Progress(done, config.batch_plan.tokens(done), trainer.state.layout, trainer.train_stream.dataset.fingerprint),
        trainer.state,
        checkpoint_bytes(accounts.total_params, parameter_dtype(config).itemsize),
    )
    if folder is not None:
        folder.event("saved", step=done, checkpoint=path.name, seconds=round(time.perf_counter() - began, 3))
        store.tidy(config.checkpoint.keep_last)
    return path


def _diverged(trainer: Trainer, accounts: Accounts, store: CheckpointStore, done: int, problem: str, advice: str = "") -> RunError:
    """Keep the parameters that led there, under a name that resuming does not take; `advice` ends the message."""
    newest = store.newest()
    resume = f"the newest good checkpoint is {newest.name}" if newest else "there is no earlier checkpoint"
    try:
        path = _save(trainer, accounts, store, None, done, name=f"diverged_{done:08d}")
        kept = f"The parameters after {done} step{'s' if done != 1 else ''} are in {path}; {resume}"
    except CheckpointError as error:
        kept = str(error)
    return RunError(
        f"{problem}; the run stops. {kept}. "
        f"A lower optimizer.peak_lr, a longer schedule.warmup_tokens or another seed are the usual ways out{advice}"
    )


def _plot(folder: RunFolder) -> Path | None:
    try:
        return plot_losses(folder.path)
    except OSError as error:
        warnings.warn(f"{folder.path}: loss.png cannot be written ({error.strerror})")
        return None
