"""SIGUSR1 (the time limit is near), SIGTERM (preemption, scancel) and SIGINT (a person) ask a run to stop at the end of its step.

One wish to stop arrives more than once and on any ranks: Slurm and Ctrl-C signal all processes, and torchrun passes on to its workers what
it gets, while a checkpoint is already being written. So nothing that arrives again hurries a run, except a person's second Ctrl-C; and
in a job (outcome.py) there is no Ctrl-C, but a script that passes SIGINT on as often as it must.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from hybrid_megatron.training.outcome import VARIABLE

STOPS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)

# A Ctrl-C that is followed by another within this time was one: the terminal's and torchrun's.
_SAME_WISH_SECONDS = 3.0


class StopRequest:
    """Which signal arrived first, if any."""

    def __init__(self):
        self.number = 0
        self.interrupted: float | None = None
        """When the first SIGINT came."""


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """While it lasts, these signals are noted. To be entered before anything heavy is imported: until then they end the process.

    A batch script that ignores them for torchrun's sake passes that on to all below, so the handlers are set whatever was there before.
    """
    request = StopRequest()
    by_hand = VARIABLE not in os.environ

    def note(number, _frame):
        now = time.monotonic()
        if number == signal.SIGINT and request.interrupted is None:
            request.interrupted = now
        elif number == signal.SIGINT and by_hand and now - request.interrupted > _SAME_WISH_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        request.number = request.number or number

    before = {number: signal.signal(number, note) for number in STOPS}
    for number in STOPS:
        signal.siginterrupt(number, False)  # not every library below tries an interrupted call again
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was set outside of Python
