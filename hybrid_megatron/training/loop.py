"""The path of a run, from a valid recipe to a finished run folder."""

import contextlib
import math
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from hybrid_megatron import platform
from hybrid_megatron.checkpoint.integrity import check_hashes
from hybrid_megatron.checkpoint.save_load import checkpoint_bytes, load_checkpoint, save_checkpoint
from hybrid_megatron.checkpoint.store import CheckpointStore, Progress, checkpoint_at, read_progress
from hybrid_megatron.config.megatron import parameter_dtype
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.config.validate import validate
from hybrid_megatron.data import Dataset, open_dataset
from hybrid_megatron.errors import CheckpointError, RunError, UserError
from hybrid_megatron.model.accounting import Accounts, account
from hybrid_megatron.model.kernels import check_kernels
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.parallel import ParallelState, start
from hybrid_megatron.parallel.state import global_rank, world_size
from hybrid_megatron.training.build import Trainer, build_trainer
from hybrid_megatron.training.console import Console
from hybrid_megatron.training.optimizer import set_hyperparameters
from hybrid_megatron.training.outcome import Outcome, tell_end, tell_running
from hybrid_megatron.training.plot import plot_losses
from hybrid_megatron.training.run_folder import RunFolder, check_same_run, open_run_folder
from hybrid_megatron.training.schedule import learning_rate
from hybrid_megatron.training.signals import StopRequest
from hybrid_megatron.training.step import NonFinite, StepResult, train_step, validation_loss
from hybrid_megatron.training.tracking import Tracker
from hybrid_megatron.training.watchdog import Watch, group_timeout, watching

_FAILED = 1 << 20
"""Told to all ranks in place of a signal's number when rank 0 cannot write its metrics."""


def train(config: RunConfig, stop: StopRequest) -> Outcome:
    """Train a recipe to its token budget, from the newest checkpoint in its run folder if there is one, or until `stop` asks to stop.

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
        return tell_end(Outcome(Path(config.run_dir), config.num_steps, complete=True))
    with watching(config) as watch, start(config.parallel, config.seed, group_timeout(config.watchdog, warm=False)) as state:
        if name := _asked_to_stop(state, stop):
            return _stopped_before_a_step(config, console, newest[1].step if newest else 0, name)
        with open_run_folder(config, state) as folder:
            watch.holding = state.from_rank_0(folder and folder.holding)
            with watch.failures_told():
                return _run(config, state, folder, store, train_data, valid_data, console, stop, watch, init_from)


def _run(
    config: RunConfig,
    state: ParallelState,
    folder: RunFolder | None,
    store: CheckpointStore,
    train_data: Dataset,
    valid_data: Dataset | None,
    console: Console,
    stop: StopRequest,
    watch: Watch,
    init_from: Path | None,
) -> Outcome:
    accounts = account(config, plan_layers(config))
    console.describe(state, accounts)
    with state.together():
        check_kernels(config, plan_layers(config))
    watch.phase("loading")
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
            tracker = Tracker(config, folder, done)
    if name := _asked_to_stop(state, stop):  # loading and checking kernels may have taken minutes, and so may the first step
        if tracker is not None:
            folder.event("stopped", step=done, signal=name)
            tracker.close(exit_code=0)
        return _stopped_before_a_step(config, console, done, name)
    try:
        tell_running(done)
        outcome = tell_end(_steps(trainer, accounts, store, folder, tracker, console, stop, watch, done))
        watch.phase("ending")
    except BaseException as error:
        if tracker is not None:
            if isinstance(error, UserError):
                folder.event("failed", error=str(error).splitlines()[0])
            tracker.close(exit_code=1)
        raise
    if tracker is not None:
        tracker.close(exit_code=0)
        console.finish(outcome.step, outcome.stopped_by, _plot(folder))
    return outcome


def _steps(
    trainer: Trainer,
    accounts: Accounts,
    store: CheckpointStore,
    folder: RunFolder | None,
    tracker: Tracker | None,
    console: Console,
    stop: StopRequest,
    watch: Watch,
    done: int,
) -> Outcome:
    """The loop: step, measure, log, save, until the budget is spent or someone asks to stop."""
    config, state = trainer.config, trainer.state
    while done < config.num_steps:
        began = time.perf_counter()
        watch.phase("data", done)
        lr = learning_rate(config, done)
        set_hyperparameters(trainer.optimizer, lr, config.optimizer.weight_decay)
        try:
            result = train_step(config, trainer.model, trainer.optimizer, trainer.train_stream, done, state, watch)
        except NonFinite as problem:
            raise _diverged(trainer, accounts, store, done, f"step {done + 1}: {problem}") from None
        platform.synchronize()
        done += 1
        if not watch.warm:  # kernels are compiled and tuned: from here on a hang shows sooner
            watch.warm = True
            state.set_timeout(group_timeout(config.watchdog, warm=True))
        metrics = _metrics(config, state, accounts, done, lr, result, time.perf_counter() - began)

        last = done == config.num_steps
        if trainer.valid_stream is not None and (last or done % config.validation.interval_steps == 0):
            watch.phase("validation", done)
            measured = validation_loss(config, trainer.model, trainer.valid_stream, state, watch)
            if not math.isfinite(measured):
                raise _diverged(trainer, accounts, store, done, f"step {done}: the validation loss is {measured}")
            metrics["validation_loss"] = measured
        watch.phase("logging", done)
        failure = _log(tracker, metrics)
        console.step(metrics)
        signal_number = state.highest(_FAILED if failure else stop.number)
        if signal_number == _FAILED:
            with state.together():
                if failure:
                    raise failure
        if last or signal_number or done % config.checkpoint.interval_steps == 0:
            watch.phase("saving")
            _save(trainer, accounts, store, folder, done)
        if signal_number and not last:
            name = signal.Signals(signal_number).name
            if folder is not None:
                folder.event("stopped", step=done, signal=name)
            return Outcome(Path(config.run_dir), done, complete=False, stopped_by=name)
    if folder is not None:
        folder.event("complete", step=done)
    return Outcome(Path(config.run_dir), done, complete=True)


def _asked_to_stop(state: ParallelState, stop: StopRequest) -> str | None:
    """The signal that any rank has got, if one has; collective."""
    number = state.highest(stop.number)
    return signal.Signals(number).name if number else None


def _stopped_before_a_step(config: RunConfig, console: Console, done: int, name: str) -> Outcome:
    """All that a run has is in its newest checkpoint, if there is one."""
    console.stopped_before(done, name)
    return tell_end(Outcome(Path(config.run_dir), done, complete=False, stopped_by=name))


def _log(tracker: Tracker | None, metrics: dict[str, float]) -> RunError | None:
    """Log on rank 0; a failure is returned, to be told to the other ranks with the signals."""
    try:
        if tracker is not None:
            tracker.log(metrics)
    except RunError as error:
        return error
    return None


def _metrics(
    config: RunConfig, state: ParallelState, accounts: Accounts, done: int, lr: float, result: StepResult, seconds: float
) -> dict[str, float]:
    """One line of metrics.jsonl, by the names of the field; mfu only where the device's peak is known."""
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
    return metrics


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


def _diverged(trainer: Trainer, accounts: Accounts, store: CheckpointStore, done: int, problem: str) -> RunError:
    """Keep the parameters that led there, under a name that resuming does not take."""
    newest = store.newest()
    resume = f"the newest good checkpoint is {newest.name}" if newest else "there is no earlier checkpoint"
    try:
        path = _save(trainer, accounts, store, None, done, name=f"diverged_{done:08d}")
        kept = f"The parameters after {done} step{'s' if done != 1 else ''} are in {path}; {resume}"
    except CheckpointError as error:
        kept = str(error)
    return RunError(
        f"{problem}; the run stops. {kept}. "
        "A lower optimizer.peak_lr, a longer schedule.warmup_tokens or another seed are the usual ways out"
    )


def _plot(folder: RunFolder) -> Path | None:
    try:
        return plot_losses(folder.path)
    except OSError as error:
        warnings.warn(f"{folder.path}: loss.png cannot be written ({error.strerror})")
        return None
