"""The path of a run, from a valid recipe to a finished run folder."""

import contextlib
import math
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from hybrid_megatron import platform
from hybrid_megatron.checkpoint.choose import check_whole, newest_whole
from hybrid_megatron.checkpoint.form import PERMANENT, ROLLING
from hybrid_megatron.checkpoint.load import load_checkpoint
from hybrid_megatron.checkpoint.origin import told_apart
from hybrid_megatron.checkpoint.saver import Saver
from hybrid_megatron.checkpoint.sizes import checkpoint_bytes
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
from hybrid_megatron.training.run_facts import run_facts
from hybrid_megatron.training.run_folder import RunFolder, check_same_run, open_run_folder, writing
from hybrid_megatron.training.schedule import learning_rate
from hybrid_megatron.training.signals import StopRequest
from hybrid_megatron.training.stability import Decision, Stability, resume_stability
from hybrid_megatron.training.step import StepResult, train_step, validation_loss
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
    _check_data(store, train_data)
    init_from = None
    if store.newest() is None and config.init_from is not None:
        with _named_init_from(config):
            init_from = checkpoint_at(Path(config.init_from))
    with watching(config) as watch, start(config.parallel, config.seed, group_timeout(config.watchdog, warm=False)) as state:
        if _is_complete(config, store, state):
            console.already_complete(config.num_steps)
            return tell_end(Outcome(Path(config.run_dir), config.num_steps, complete=True))
        if name := _asked_to_stop(state, stop):
            newest = store.newest()
            return _stopped_before_a_step(config, console, int(newest.name[5:]) if newest else 0, name)
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
    plan = plan_layers(config)
    accounts = account(config, plan)
    console.describe(state, accounts)
    with state.together():
        check_kernels(config, plan)
    watch.phase("loading")
    chosen = newest_whole(store, state)
    init_from = state.from_rank_0(None if chosen else init_from)
    with _named_init_from(config):
        trainer = build_trainer(config, state, train_data, valid_data, init_from)
    done = 0
    if chosen is not None:
        load_checkpoint(chosen, trainer.model, trainer.optimizer, state)
        console.resumed(chosen.path, chosen.progress)
        done = chosen.progress.step
    elif trainer.origin is not None:
        console.initialised(init_from, trainer.origin)
    tracker = None
    with state.together():
        if folder is not None:
            folder.record(config)
            store.tidy()
            if chosen is not None:
                _set_aside(store, folder, chosen.damaged)
            if trainer.origin is not None:
                folder.event("init_from", checkpoint=str(init_from.resolve()), step=trainer.origin.step, tokens=trainer.origin.tokens)
            folder.event("start", step=done, layout=state.layout, world_size=state.world_size, device=platform.device_name())
            tracker = Tracker(config, folder, done, run_facts(state, accounts, folder))
    if name := _asked_to_stop(state, stop):  # loading and checking kernels may have taken minutes, and so may the first step
        if tracker is not None:
            folder.event("stopped", step=done, signal=name)
            tracker.close(exit_code=0)
        return _stopped_before_a_step(config, console, done, name)
    stability = resume_stability(config, state, folder, done)
    tell = folder.event if folder is not None else _say_nothing
    try:
        tell_running(done)
        with Saver(store, config.checkpoint, trainer.model, trainer.optimizer, state, tell) as saver:
            outcome = _steps(trainer, accounts, saver, folder, tracker, stability, console, stop, watch, done)
        tell_end(outcome)
        watch.phase("ending")
    except BaseException as error:
        if tracker is not None:
            if isinstance(error, UserError):
                folder.event("failed", error=str(error).splitlines()[0])
            tracker.close(exit_code=1)
        raise
    if tracker is not None:
        tracker.close(exit_code=0)
        console.finish(outcome.step, outcome.stopped_by, _plot(folder), tracker.wandb.sync_command)
    return outcome


def _steps(
    trainer: Trainer,
    accounts: Accounts,
    saver: Saver,
    folder: RunFolder | None,
    tracker: Tracker | None,
    stability: Stability,
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
        result, decision = None, stability.leave_out(done + 1)
        if decision is None:
            result = train_step(config, trainer.model, trainer.optimizer, trainer.train_stream, done, state, stability.judge, watch)
            decision = result.decision
        _tell(folder, console, done + 1, decision)
        if decision.stop is not None:
            advice = f"; [{done + 1}, {done + 1}] added to stability.skip_steps leaves this batch out"
            raise _diverged(trainer, accounts, saver, done, f"step {done + 1}: {decision.stop}", advice)
        platform.synchronize()
        done += 1
        if result is not None and not watch.warm:  # kernels are compiled and tuned: from here on a hang shows sooner
            watch.warm = True
            state.set_timeout(group_timeout(config.watchdog, warm=True))
        metrics = _metrics(config, state, accounts, done, lr, result, time.perf_counter() - began) | decision.metrics
        if stall := saver.take_stall():
            metrics["checkpoint_stall_seconds"] = stall

        last = done == config.num_steps
        if trainer.valid_stream is not None and (last or done % config.validation.interval_steps == 0):
            watch.phase("validation", done)
            measured = validation_loss(config, trainer.model, trainer.valid_stream, state, watch)
            if not math.isfinite(measured):
                raise _diverged(trainer, accounts, saver, done, f"step {done}: the validation loss is {measured}")
            metrics["validation_loss"] = measured
        watch.phase("logging", done)
        failure = _log(tracker, metrics)
        console.step(metrics)
        signal_number, still_writing = state.highest([_FAILED if failure else stop.number, saver.writing])
        if signal_number == _FAILED:
            with contextlib.suppress(CheckpointError):  # the failure comes first
                saver.wait()
            with state.together():
                if failure:
                    raise failure
        if saver.under_way and not still_writing:
            watch.phase("saving")
            saver.finish()
        if form := _due(config, done, signal_number):
            watch.phase("saving")
            if tracker is not None:
                tracker.make_durable()
            _save(trainer, accounts, saver, done, form, wait=bool(last or signal_number))
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
    (number,) = state.highest([stop.number])
    return signal.Signals(number).name if number else None


def _stopped_before_a_step(config: RunConfig, console: Console, done: int, name: str) -> Outcome:
    """All that a run has is in its newest checkpoint, if there is one."""
    console.stopped_before(done, name)
    return tell_end(Outcome(Path(config.run_dir), done, complete=False, stopped_by=name))


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


def _check_data(store: CheckpointStore, data: Dataset) -> None:
    """Raise CheckpointError if the newest checkpoint whose marker can be read was trained on other data."""
    for newest in reversed(store.complete()):
        with contextlib.suppress(CheckpointError):
            trained_on = read_progress(newest).data
            break
    else:
        return
    if trained_on != data.fingerprint:
        raise CheckpointError(
            f"data.train={data.prefix}: {newest} was trained on other data (fingerprint {trained_on[:12]}, "
            f"this is {data.fingerprint[:12]}); resume with the same dataset, or give another run_dir"
        )


def _is_complete(config: RunConfig, store: CheckpointStore, state: ParallelState) -> bool:
    """Whether the run has a whole checkpoint after its last step; collective."""
    newest = state.from_rank_0(store.newest())
    if newest is None or int(newest.name[5:]) < config.num_steps:
        return False
    try:
        check_whole(newest, state)
    except CheckpointError:  # said when an older one is taken
        return False
    if state.rank == 0:
        store.tidy(config.checkpoint.keep_last)
    return True


def _set_aside(store: CheckpointStore, folder: RunFolder, damaged: list[tuple[Path, str]]) -> None:
    """Say which checkpoints were passed over, and move them out of the way of those to come."""
    for path, problem in damaged:
        with writing(path):
            aside = store.set_aside(path)
        folder.event("skipped_checkpoint", checkpoint=path.name, reason=problem, moved_to=aside.name)
        warnings.warn(f"{problem}; it is now {aside.name}, and the run goes on from the one before it")


def _due(config: RunConfig, done: int, signal_number: int) -> str | None:
    """The form in which to save after step `done`, or None. Who presses Ctrl-C may want another layout; other signals leave little time."""
    settings = config.checkpoint
    if done == config.num_steps or signal_number == signal.SIGINT:
        return PERMANENT
    if signal_number:
        return ROLLING
    if settings.permanent_interval_steps and done % settings.permanent_interval_steps == 0:
        return PERMANENT
    return ROLLING if done % settings.interval_steps == 0 else None


def _say_nothing(_kind: str, **_facts) -> None:
    pass


@contextlib.contextmanager
def _named_init_from(config: RunConfig) -> Iterator[None]:
    """An error about the checkpoint that a fresh run starts from names the setting."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"init_from={error}{told_apart(config)}") from None


def _save(trainer: Trainer, accounts: Accounts, saver: Saver, done: int, form: str, *, wait: bool, name: str | None = None) -> Path:
    config = trainer.config
    progress = Progress(done, config.batch_plan.tokens(done), trainer.state.layout, trainer.train_stream.dataset.fingerprint, form)
    needed = checkpoint_bytes(accounts.total_params, parameter_dtype(config).itemsize)
    return saver.save(name or f"step_{done:08d}", progress, needed, wait=wait)


def _diverged(trainer: Trainer, accounts: Accounts, saver: Saver, done: int, problem: str, advice: str = "") -> RunError:
    """Keep the parameters that led there, under a name that resuming does not take; `advice` ends the message."""
    try:
        saver.wait()
        path = _save(trainer, accounts, saver, done, PERMANENT, wait=True, name=f"diverged_{done:08d}")
        newest = saver.store.newest()
        resume = f"the newest good checkpoint is {newest.name}" if newest else "there is no earlier checkpoint"
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
