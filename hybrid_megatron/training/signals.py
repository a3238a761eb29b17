"""SIGTERM and SIGINT ask a run to stop at the end of its step; a second one stops it at once."""

import contextlib
import signal
from collections.abc import Iterator


class StopRequest:
    """Which signal arrived, if any."""

    def __init__(self):
        self.name: str | None = None

    def __bool__(self) -> bool:
        return self.name is not None


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    request = StopRequest()
    caught = (signal.SIGTERM, signal.SIGINT)

    def note(number, _frame):
        request.name = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)  # the second time it acts at once

    before = {number: signal.signal(number, note) for number in caught}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
