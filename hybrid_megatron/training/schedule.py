"""Learning rate as a pure function of tokens, so that a resumed run, a plan and a plot all read the same curve."""

import math

from hybrid_megatron.config.schema import RunConfig

# What is left of the way from the peak down to `min_lr`, by the part of the falling tokens that has passed.
_FALLS = {
    "cosine": lambda passed: 0.5 * (1 + math.cos(math.pi * passed)),
    "linear": lambda passed: 1 - passed,
    "wsd": lambda passed: 1 - passed,
}


def learning_rate(config: RunConfig, step: int) -> float:
    """Learning rate of step `step` (0-based), for every shape by the tokens seen at the step's end.

    Hence the first step has, with b tokens a step and w of warm-up, b / w of `optimizer.peak_lr` and not 0; the step that ends with the
    warm-up has the peak; and the last one has `schedule.min_lr` itself. cosine and linear fall from the end of the warm-up to the end of
    the last step, wsd over the last `schedule.decay_tokens` before that, constant never. So a token budget that is no multiple of the batch
    counts as rounded up to whole steps.
    """
    schedule, peak, low = config.schedule, config.optimizer.peak_lr, config.schedule.min_lr
    tokens, total = config.batch_plan.tokens(step + 1), config.batch_plan.total_tokens
    if tokens <= schedule.warmup_tokens:
        return peak * tokens / schedule.warmup_tokens
    begin = total - schedule.decay_tokens if schedule.shape == "wsd" else schedule.warmup_tokens
    if schedule.shape == "constant" or tokens <= begin:
        return peak
    return low + (peak - low) * _FALLS[schedule.shape]((tokens - begin) / (total - begin))
