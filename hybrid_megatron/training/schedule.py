"""Learning rate as a pure function of tokens, so that a resumed run, a plan and a plot all read the same curve."""

import math

from hybrid_megatron.config.schema import RunConfig


def learning_rate(config: RunConfig, step: int) -> float:
    """Learning rate of step `step` (0-based), by the tokens seen at its end.

    Linear from 0 to `optimizer.peak_lr` over `schedule.warmup_tokens`, then half a cosine to `schedule.min_lr` at the last step's end.
    """
    peak, low = config.optimizer.peak_lr, config.schedule.min_lr
    tokens = (step + 1) * config.train.batch_tokens
    total = config.num_steps * config.train.batch_tokens
    warmup = config.schedule.warmup_tokens
    if tokens <= warmup:
        return peak * tokens / warmup
    progress = (tokens - warmup) / (total - warmup)
    return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * progress))
