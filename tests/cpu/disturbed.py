"""python -m tests.cpu.disturbed HOW WORDS: `launch train WORDS` with something that goes wrong in the last rank."""

import ctypes
import os
import sys
import time

from hybrid_megatron.training.watchdog import _TICK_SECONDS
from launch.train import main

LAST_RANK = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
STEP = 6


def in_data(act) -> None:
    """The last rank does this while it gets the samples of its seventh step."""
    from hybrid_megatron.data import BatchStream

    plain = BatchStream.step

    def step(stream, number):
        if number == STEP and LAST_RANK:
            act()
        yield from plain(stream, number)

    BatchStream.step = step


def raises() -> None:
    raise ZeroDivisionError("a mistake of ours")


def sleeps() -> None:
    time.sleep(1000)


def sleeps_once() -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(1000)


def holds_the_interpreter() -> None:
    time.sleep(2 * _TICK_SECONDS)  # the watchdog sees that the first step is done, and sets its shorter time
    ctypes.PyDLL(None).sleep(1000)  # unlike CDLL's, its calls keep the GIL


if __name__ == "__main__":
    in_data({act.__name__: act for act in (raises, sleeps, sleeps_once, holds_the_interpreter)}[sys.argv[1]])
    main(sys.argv[2:])
