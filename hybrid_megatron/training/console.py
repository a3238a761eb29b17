"""What a person sees while a run works. Rank 0 speaks, the others are silent."""

import time
from pathlib import Path

from hybrid_megatron import platform
from hybrid_megatron.checkpoint.store import Progress
from hybrid_megatron.config.schema import RunConfig, ScheduleConfig
from hybrid_megatron.model.accounting import Accounts
from hybrid_megatron.model.kernels import kernels_taken
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.ops.longce import Windows
from hybrid_megatron.parallel import ParallelState
from hybrid_megatron.training.tracking import read_metrics


class Console:
    def __init__(self, config: RunConfig, speaks: bool):
        self.config, self.speaks = config, speaks
        self.began: float | None = None
        self.first = 0  # tokens at that time

    def say(self, text: str) -> None:
        if self.speaks:
            print(text, flush=True)

    def describe(self, state: ParallelState, accounts: Accounts) -> None:
        """Every derived number, before the first step."""
        config, train = self.config, self.config.train
        parts = ", ".join(f"{name} {count:,}" for name, count in accounts.params.items())
        micro_batches = config.batch_samples // (train.micro_batch * state.data)
        self.say(f"run        {config.run_dir}")
        self.say(f"layers     {plan_layers(config)}")
        self.say(f"parameters {accounts.total_params:,} ({parts})")
        self.say(f"flops      {accounts.flops_per_token / 1e6:,.1f} M a token, forward and backward, at {train.context:,} tokens a sample")
        if config.longce.enabled:
            windows = Windows(train.context, config.longce.window, config.longce.stride)
            self.say(
                f"longce     {windows.count} short contexts of {windows.length:,} tokens a sample, the last {windows.stride:,} of each "
                f"scored; gamma {config.longce.gamma:g}; {accounts.short_flops_per_token / 1e6:,.1f} M of the flops a token"
            )
        self.say(f"device     {platform.device_name()} x{state.world_size}, {train.precision}, layout: {_sizes(state.layout)}")
        self.say(
            f"batch      {train.batch_tokens:,} tokens = {config.batch_samples} samples of {train.context:,} "
            f"= {state.data} data ranks x {micro_batches} micro-batches of {train.micro_batch}"
        )
        if config.schedule.start_batch_tokens is not None:
            first, *_, full = config.batch_plan.phases
            self.say(
                f"           growing from {first.batch_tokens:,} tokens in steps of that over the first "
                f"{config.schedule.batch_warmup_tokens:,}, full from step {full.first_step + 1:,} on"
            )
        if kernels := kernels_taken(config, plan_layers(config)):
            self.say(f"kernels    {kernels}")
        self.say(
            f"steps      {config.num_steps:,} for {train.tokens:,} tokens, the first {config.schedule.warmup_tokens:,} of them warm-up to "
            f"a learning rate of {config.optimizer.peak_lr:.2e}, then {_course(config.schedule)}"
        )

    def resumed(self, checkpoint: Path, progress: Progress) -> None:
        self.say(f"resumed    {checkpoint.name} ({progress.tokens:,} tokens), written by layout {_sizes(progress.layout)}")

    def initialised(self, checkpoint: Path, origin: Progress) -> None:
        self.say(f"init_from  {checkpoint} ({origin.tokens:,} tokens), its parameters alone")

    def found(self, step: int, sentence: str, action: str) -> None:
        """What looks wrong about a step, and what is done about it."""
        self.say(f"stability  step {step}: {sentence}; " + {"warn": "the update is made", "skip": "no update is made"}[action])

    def step(self, metrics: dict[str, float]) -> None:
        """One line every `tracking.log_interval` steps, with the time left by the mean pace of this session."""
        now, step, tokens = time.perf_counter(), metrics["step"], metrics["tokens"]
        if self.began is None:  # the first step compiles and warms up: not part of the pace
            self.began, self.first = now, tokens
        elif "tokens_per_second_per_gpu" not in metrics:  # neither is a step that was left out
            self.first += self.config.batch_plan.batch_tokens(step - 1)
        shown = step % self.config.tracking.log_interval == 0 or step == self.config.num_steps or "validation_loss" in metrics
        if not shown and step > 1:
            return
        line = f"step {step:>6}/{self.config.num_steps}  {tokens / 1e6:>9.2f}M tokens  "
        # "no" where the step was left out, or it is not a number
        line += f"{self._loss_name} {metrics['lm_loss']:.4f}  " if "lm_loss" in metrics else f"no {self._loss_name}      "
        line += f"lr {metrics['lr']:.2e}"
        if "grad_norm" in metrics:
            line += f"  grad {metrics['grad_norm']:.2f}"
        if "tokens_per_second_per_gpu" in metrics:
            line += f"  {metrics['tokens_per_second_per_gpu']:>9,.0f} tok/s"
        if "skipped" in metrics:
            line += "  skipped"
        if "longce_mean_weight" in metrics:
            line += f"  mean weight {metrics['longce_mean_weight']:.3f}"
        if "mfu" in metrics:
            line += f"  mfu {metrics['mfu']:.1%}"
        if tokens > self.first:  # by tokens, since steps may grow
            left = (now - self.began) / (tokens - self.first) * (self.config.batch_plan.total_tokens - tokens)
            line += f"  left {_duration(left)}"
        if "validation_loss" in metrics:
            line += f"  validation loss {metrics['validation_loss']:.4f}"
        self.say(line)

    def already_complete(self, step: int) -> None:
        self.say(f"complete   this run has done all its {step:,} steps; {self._result()}")
        self.say(f"run folder {self.config.run_dir}")

    def stopped_before(self, step: int, by: str) -> None:
        """A run that was asked to stop before it had done a step."""
        done = f"before the next step: {step:,} are done, as its newest checkpoint has them" if step else "before its first step"
        self.say(f"stopped    by {by} {done}, nothing lost; run the same command again to {'resume' if step else 'begin'}")

    def finish(self, step: int, stopped_by: str | None, plot: Path | None, sync_command: str | None) -> None:
        if stopped_by:
            self.say(f"stopped    by {stopped_by} after step {step:,}, with a checkpoint; run the same command again to resume")
        else:
            self.say(f"complete   {step:,} steps; {self._result()}")
        self.say(f"run folder {self.config.run_dir}")
        if plot is not None:
            self.say(f"plot       {plot}")
        if sync_command is not None:
            self.say(f"wandb      offline; to upload this run, all its parts: {sync_command}")

    @property
    def _loss_name(self) -> str:
        """Plain cross entropy, by its name in metrics.jsonl where what is optimised is another."""
        return "lm_loss" if self.config.longce.enabled else "loss"

    def _result(self) -> str:
        """Final losses and speed, as metrics.jsonl has them."""
        metrics = read_metrics(Path(self.config.run_dir) / "metrics.jsonl")
        if not metrics:
            return "metrics.jsonl is not there"
        words = []
        losses = [m["lm_loss"] for m in metrics if "lm_loss" in m][-10:]
        if losses:
            words.append(f"training {self._loss_name} {sum(losses) / len(losses):.4f} (mean of the last {len(losses)} steps)")
        measured = [m["validation_loss"] for m in metrics if "validation_loss" in m]
        if measured:
            words.append(f"validation loss {measured[-1]:.4f}")
        rates = sorted(m["tokens_per_second_per_gpu"] for m in metrics if "tokens_per_second_per_gpu" in m)
        if rates:
            words.append(f"{rates[len(rates) // 2]:,.0f} tokens/s per device (median)")
        skipped = sum("skipped" in m for m in metrics)
        if skipped:
            words.append(f"{skipped:,} step{'s' if skipped > 1 else ''} skipped")
        return ", ".join(words)


def _course(schedule: ScheduleConfig) -> str:
    """What the learning rate does after its warm-up."""
    if schedule.shape == "constant":
        return "constant"
    if schedule.shape == "wsd":
        return f"constant, and linear to {schedule.min_lr:.2e} over the last {schedule.decay_tokens:,} tokens"
    return f"{schedule.shape} to {schedule.min_lr:.2e}"


def _sizes(layout: dict[str, int]) -> str:
    return " ".join(f"{name} {size}" for name, size in layout.items())


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"
