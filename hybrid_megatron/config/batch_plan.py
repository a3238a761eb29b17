"""The batch of every step: full from the first step on, or growing over the first tokens of the run.

The batch starts at `start_batch_tokens` and grows in steps of that size to `batch_tokens`, linearly over `batch_warmup_tokens`: of its
k = batch_tokens / start_batch_tokens sizes, each but the last is used for 1 / (k - 1) of the warm-up (as by Megatron-LM's
--rampup-batch-size, the start being the increment). That is, a step that begins after t tokens has

    start_batch_tokens * (1 + floor((k - 1) t / batch_warmup_tokens)) tokens, at most batch_tokens.

No parallel layout has a part in this, so a run sees the same samples in the same steps when it is resumed under another one.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Phase:
    """Consecutive steps of one size."""

    first_step: int
    first_token: int
    """Tokens before it."""
    batch_tokens: int


@dataclass(frozen=True)
class BatchPlan:
    """Which samples each step takes. Sample i is the i-th of the run, counted over its epochs; steps count from 0."""

    context: int
    """Tokens a sample."""
    num_steps: int
    phases: tuple[Phase, ...]

    def tokens(self, steps: int) -> int:
        """Tokens of the first `steps` steps together."""
        phase = self._phase(steps)
        return phase.first_token + (steps - phase.first_step) * phase.batch_tokens

    def batch_tokens(self, step: int) -> int:
        """Tokens of step `step`, over all ranks."""
        return self._phase(step).batch_tokens

    def samples(self, step: int) -> range:
        """Samples of step `step`, over all ranks."""
        return range(self.tokens(step) // self.context, self.tokens(step + 1) // self.context)

    @property
    def total_tokens(self) -> int:
        """Tokens of all steps: the token budget, rounded up to whole steps."""
        return self.tokens(self.num_steps)

    def steps_within(self, tokens: int) -> int:
        """The most steps, from the first on, that take no more than `tokens` tokens."""
        return bisect_right(range(1, self.num_steps + 1), tokens, key=self.tokens)

    def _phase(self, step: int) -> Phase:
        return self.phases[bisect_right(self.phases, step, key=lambda phase: phase.first_step) - 1]


@lru_cache(maxsize=8)
def batch_plan(tokens: int, context: int, batch_tokens: int, start_batch_tokens: int | None, batch_warmup_tokens: int) -> BatchPlan:
    """The plan of a token budget; the settings are those of `train` and `schedule`, found valid."""
    start = start_batch_tokens or batch_tokens
    growths = batch_tokens // start - 1
    phases, step, seen = [], 0, 0
    for size in range(1, growths + 1):
        end = -(-size * batch_warmup_tokens // growths)  # of this size, unless a step of the one before went beyond
        steps = max(0, -(-(end - seen) // (size * start)))
        if steps:
            phases.append(Phase(step, seen, size * start))
        step, seen = step + steps, seen + steps * size * start
    phases.append(Phase(step, seen, batch_tokens))
    return BatchPlan(context, step - (seen - tokens) // batch_tokens, tuple(phases))
