"""What a run does about a step that looks wrong, judged by its loss and gradient norm before the optimizer changes anything.

A loss spike is a loss above the mean of the last `stability.window` steps by more than `stability.sigmas` of their standard deviations, and
a gradient norm spike likewise: the rule of OLMo-core's SkipStepOptimizer, with its 6 standard deviations over 128 steps and its wait for
half of them, but only for what rises. Every finite value is remembered, those of skipped steps too, so that a level that has changed for
good is taken for the usual one after some steps.

A skipped step, whether for what it computed or because `stability.skip_steps` names it, changes neither parameters nor Adam's moments nor
Adam's count of steps. Its batch counts as seen: the next step takes the next batch, and tokens, learning rate, batch size, validation and
checkpoints go on by steps and tokens as if the update had been made.

Loss and gradient norm are sums over all ranks that each of them holds to the bit, so that all come to the same decision without asking
each other.
"""

import math
import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.parallel import ParallelState
from hybrid_megatron.training.run_folder import RunFolder
from hybrid_megatron.training.tracking import read_metrics


@dataclass(frozen=True)
class Finding:
    """What looks wrong about a step, and what is done about it."""

    kind: str
    """non_finite, loss_spike, grad_norm_spike or skip_steps: the kind of its event and, but for the last, its metric."""
    action: str
    """warn, skip or stop."""
    sentence: str
    facts: dict
    """Of its event."""


@dataclass(frozen=True)
class Decision:
    """What becomes of a step."""

    update: bool
    """Whether the optimizer makes its update."""
    findings: tuple[Finding, ...] = ()
    stop: str | None = None
    """Why the run stops, if it does."""

    @property
    def metrics(self) -> dict[str, float]:
        """1 for each thing found, and `skipped`: 1 where no update was made; nothing about a usual step."""
        found = {finding.kind: 1 for finding in self.findings if finding.kind != "skip_steps"}
        return found if self.update else found | {"skipped": 1}


class RecentValues:
    """The last values of one quantity, and the bound above which the next one is a spike."""

    def __init__(self, window: int, sigmas: float):
        self.values: deque[float] = deque(maxlen=window)
        self.sigmas = sigmas

    @property
    def bound(self) -> float:
        """Infinite until half the window is filled."""
        count = len(self.values)
        if count < self.values.maxlen // 2:
            return math.inf
        mean = math.fsum(self.values) / count
        variance = math.fsum((value - mean) ** 2 for value in self.values) / (count - 1)
        return mean + self.sigmas * math.sqrt(variance)


@dataclass(frozen=True)
class Memory:
    """What the decisions about the steps to come depend on."""

    values: tuple[tuple[float, float], ...] = ()
    """Loss and gradient norm of the last steps, oldest first."""
    skipped: int = 0
    """Steps skipped in a row, up to the last one, for what they computed."""
    complete: bool = True
    """Whether these are all that a run that never stopped would have."""


_NOTHING = Memory()


class Stability:
    def __init__(self, config: RunConfig, memory: Memory = _NOTHING):
        self.settings = config.stability
        self.left_out = _joined(config.stability.skip_steps)
        self.loss, self.grad_norm = (RecentValues(self.settings.window, self.settings.sigmas) for _ in range(2))
        for loss, grad_norm in memory.values:
            self._remember(loss, grad_norm)
        self.skipped = memory.skipped
        self.told: tuple[int, int] | None = None  # the window that was told of last

    def leave_out(self, step: int) -> Decision | None:
        """The decision about step `step` (1-based) if `stability.skip_steps` names it; its batch need not be computed."""
        window = next(((first, last) for first, last in self.left_out if first <= step <= last), None)
        if window is None:
            return None
        if window == self.told:
            return Decision(update=False)
        self.told = window
        first, last = window
        sentence = f"stability.skip_steps leaves out the batches of steps {first} to {last}"
        return Decision(False, (Finding("skip_steps", "skip", sentence, {"first": first, "last": last}),))

    def judge(self, loss: float, grad_norm: float) -> Decision:
        """The decision about a step, and what it computed remembered. Called once a step, in their order, on every rank."""
        found = list(self._non_finite(loss, grad_norm))
        if not found:
            found += self._spike("loss_spike", self.settings.loss_spike, self.loss, "loss", "the loss", loss)
            found += self._spike(
                "grad_norm_spike", self.settings.grad_norm_spike, self.grad_norm, "grad_norm", "the gradient norm", grad_norm
            )
            self._remember(loss, grad_norm)
        actions = {finding.action for finding in found}
        if not actions & {"skip", "stop"}:
            self.skipped = 0
            return Decision(True, tuple(found))
        self.skipped += 1
        if "stop" in actions:
            return Decision(False, tuple(found), next(finding.sentence for finding in found if finding.action == "stop"))
        if self.skipped > self.settings.max_skipped:
            found = [replace(finding, action="stop") if finding.action == "skip" else finding for finding in found]
            sentence = next(finding.sentence for finding in found if finding.action == "stop")
            return Decision(False, tuple(found), f"{sentence}, and {self._as_many()} were skipped (stability.max_skipped)")
        return Decision(False, tuple(found))

    def _as_many(self) -> str:
        count = self.settings.max_skipped
        return f"the {count} steps before it" if count > 1 else "the step before it"

    def _remember(self, loss: float, grad_norm: float) -> None:
        self.loss.values.append(loss)
        self.grad_norm.values.append(grad_norm)

    def _non_finite(self, loss: float, grad_norm: float) -> Iterable[Finding]:
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        said = f"the gradient norm is {grad_norm} at a loss of {loss:.4f}" if math.isfinite(loss) else f"the loss is {loss}"
        yield Finding("non_finite", self.settings.non_finite, said, {"loss": str(loss), "grad_norm": str(grad_norm)})  # not JSON's numbers

    def _spike(self, kind: str, policy: str, watch: RecentValues, name: str, said: str, value: float) -> Iterable[Finding]:
        if policy == "ignore" or value <= (bound := watch.bound):
            return
        sentence = (
            f"{said} is {value:.4f}, above {bound:.4f}, the mean of the last {len(watch.values)} steps and {watch.sigmas:g} of their "
            "standard deviations"
        )
        yield Finding(kind, policy, sentence, {name: value, "bound": bound})


def resume_stability(config: RunConfig, state: ParallelState, folder: RunFolder | None, done: int) -> Stability:
    """Stability after `done` steps: it decides as that of a run that never stopped. Collective.

    Rank 0 reads the last steps in metrics.jsonl, whose numbers are those that were judged, to the bit, and tells the others. Where some are
    missing, a warning and an event say so, and what is left is used.
    """
    memory = None
    if folder is not None:
        memory = recall(config, _lines_of(folder), done)
        if not memory.complete:
            folder.event("spikes_forgotten", step=done, known=len(memory.values))
            warnings.warn(
                f"{folder.path / 'metrics.jsonl'}: lines of the last steps before step {done + 1} are missing, so the watch for spikes "
                f"begins with {len(memory.values)} of {config.stability.window} steps and may decide otherwise than that of a run that "
                "never stopped"
            )
    return Stability(config, state.from_rank_0(memory))


def recall(config: RunConfig, lines: list[dict], done: int) -> Memory:
    """What the lines of metrics.jsonl up to step `done` leave in memory."""
    left_out = _joined(config.stability.skip_steps)
    values: deque[tuple[float, float]] = deque(maxlen=config.stability.window)
    skipped, last = 0, 0
    complete = True
    for line in lines:
        step = line["step"]
        if step > done:
            break
        if step != last + 1:
            values.clear()
            skipped, complete = 0, False
        last = step
        if "loss" in line and "grad_norm" in line:  # neither was NaN or infinite
            values.append((line["loss"], line["grad_norm"]))
        if not any(first <= step <= end for first, end in left_out):
            skipped = skipped + 1 if "skipped" in line else 0
    if last != done:
        return Memory(complete=False)
    return Memory(tuple(values), skipped, complete or len(values) == values.maxlen)


def _lines_of(folder: RunFolder) -> list[dict]:
    try:
        return read_metrics(folder.path / "metrics.jsonl")
    except OSError:
        return []


def _joined(windows: list[list[int]]) -> list[tuple[int, int]]:
    """Windows of steps in their order, those that overlap or touch as one."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(windows):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return joined
