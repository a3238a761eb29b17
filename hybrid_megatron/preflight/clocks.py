"""How far the nodes' clocks are apart, by Cristian's algorithm over the store: a node asks, the first rank answers with its time, and the
answer is of a moment between question and receipt."""

import contextlib
import time
from dataclasses import dataclass

from hybrid_megatron.preflight.exchange import Exchange
from hybrid_megatron.preflight.finding import Finding, Level, fine
from hybrid_megatron.preflight.job import Job

MOST_SECONDS = 2.0
_ROUNDS = 3
_SECONDS = 10.0


@dataclass(frozen=True)
class Offset:
    """A node's clock minus the first node's, in seconds, right within `bound`."""

    seconds: float
    bound: float


def measure_offset(exchange: Exchange, job: Job) -> Offset | None:
    """Of this node, on its first rank; None elsewhere, and where nobody answers. The first rank of all serves one after the other."""
    asking = [ranks[0] for node, ranks in list(job.ranks.items())[1:]]
    if exchange.rank == 0:
        for rank in asking:
            with contextlib.suppress(TimeoutError):  # it is named when all are asked for what they measured
                for number in range(_ROUNDS):
                    exchange.told(f"clock/{rank}/{number}/asked", _SECONDS)
                    exchange.tell(f"clock/{rank}/{number}/time", time.time())
        return Offset(0.0, 0.0)
    if exchange.rank not in asking:
        return None
    try:
        found = [_ask(exchange, f"clock/{exchange.rank}/{number}", len(asking)) for number in range(_ROUNDS)]
    except TimeoutError:
        return None
    return min(found, key=lambda offset: offset.bound)


def _ask(exchange: Exchange, key: str, turns: int) -> Offset:
    asked = time.time()
    exchange.tell(f"{key}/asked", None)
    answer = exchange.told(f"{key}/time", turns * _SECONDS)
    received = time.time()
    return Offset((asked + received) / 2 - answer, (received - asked) / 2)


def judge_clocks(offsets: dict[str, Offset | None]) -> list[Finding]:
    """`offsets`: of each node, the first one's 0."""
    offsets = {node: offset for node, offset in offsets.items() if offset is not None}
    apart = {node: offset for node, offset in offsets.items() if abs(offset.seconds) - offset.bound > MOST_SECONDS}
    if apart:
        told = ", ".join(f"{node} by {offset.seconds:+.1f} s" for node, offset in apart.items())
        rule = f"more than {MOST_SECONDS:.0f} s from {next(iter(offsets))}: times in logs, heartbeats and on files cannot be compared"
        return [Finding("clocks", Level.WARNING, told, rule, "the nodes' time service (chrony, ntpd) wants a look")]
    if len(offsets) == 1:
        return []
    furthest = max(offsets.values(), key=lambda offset: abs(offset.seconds))
    return [fine("clocks", f"within {abs(furthest.seconds) + furthest.bound:.3f} s of each other")]
