"""SIGTERM and SIGINT ask a run to stop at the end of its step; the same again, later, stops it at once."""

import contextlib
import signal
import time
from collections.abc import Iterator

# One wish to stop arrives more than once: Ctrl-C and Slurm signal all processes, and torchrun passes on to its workers what it gets.
_SAME_WISH_SECONDS = 3.0


class StopRequest:
    """Which signal arrived first, if any."""

    def __init__(self):
        self.number = 0
        self.arrived = 0.0


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    request = StopRequest()
    caught = (signal.SIGTERM, signal.SIGINT)

    def note(number, _frame):
        if not request.number:
            request.number, request.arrived = number, time.monotonic()
        elif time.monotonic() - request.arrived > _SAME_WISH_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    before = {number: signal.signal(number, note) for number in caught}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
