"""Values of all ranks for all ranks, over torch.distributed's key-value store.

A collective waits for a rank that never comes until its own timeout, and then says that something timed out. Here every rank puts its value
down and looks for the others' until `seconds` have passed; then the ranks without a value are known by number. The first rank that gives up
says for all who was silent, so that no two ranks go different ways.
"""

import contextlib
import json
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

PAUSES = (0.002, 0.05)
"""Shortest and longest pause in seconds between two looks."""
_CONNECT_SECONDS = 120.0
"""Until the process that hosts the store must be there: without torchrun's own it starts with the others."""
_FAREWELL_SECONDS = 10.0


class Silent(Exception):
    """Some ranks did not answer in time."""

    def __init__(self, topic: str, ranks: list[int]):
        super().__init__(f"{topic}: no answer from ranks {ranks}")
        self.topic, self.ranks = topic, ranks


class Broken(Exception):
    """Some ranks could not find out what they were asked for: `problems`, by rank."""

    def __init__(self, topic: str, problems: dict[int, str]):
        super().__init__(f"{topic}: {problems}")
        self.topic, self.problems = topic, problems


class Exchange:
    def __init__(self, store: dist.Store, rank: int, size: int, seconds: float, hosts: bool = False):
        """`seconds`: how long ranks wait for each other. `hosts`: the store lives in this process."""
        self.store, self.rank, self.size, self.seconds, self.hosts = store, rank, size, seconds, hosts
        self.rounds = 0
        self.gone: list[int] = []
        """Ranks that nobody waits for any more."""

    def of_all(self, topic: str, find: Callable) -> list:
        """What `find()` gives on every rank (any picklable object), on every rank. Collective.

        Raises Silent or Broken, on every rank that is still there: a rank whose `find` raises still answers the others.
        """
        self.rounds += 1
        keys = [f"{self.rounds}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], pickle.dumps(_attempt(find)))
        given_up = f"{self.rounds}/silent"
        silent = []
        if not self._appears(keys, self.seconds, unless=given_up):
            silent = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        silent = json.loads(self.store.compare_set(given_up, "", json.dumps(silent)))
        if silent:
            self.gone = silent
            raise Silent(topic, silent)
        answers = [pickle.loads(self.store.get(key)) for key in keys]
        problems = {rank: problem for rank, (_, problem) in enumerate(answers) if problem}
        if problems:
            raise Broken(topic, problems)
        return [value for value, _ in answers]

    def heard_first(self) -> list:
        """What those ranks have answered to the first question that have answered so far."""
        keys = [f"1/{rank}" for rank in range(self.size)]
        return [pickle.loads(self.store.get(key))[0] for key in keys if self.store.check([key])]

    def tell(self) -> None:
        """The one that speaks has spoken."""
        self.store.set("told", b"")

    def told(self) -> None:
        """Wait for that, since torchrun ends all processes with the first that ends badly; not for ever."""
        self._appears(["told"], _FAREWELL_SECONDS)

    def leave(self) -> None:
        """The process that hosts the store stays until the others need it no more."""
        self.store.set(f"left/{self.rank}", b"")
        if self.hosts:
            self._appears([f"left/{rank}" for rank in range(self.size) if rank not in self.gone], _FAREWELL_SECONDS)

    def _appears(self, keys: list[str], seconds: float, unless: str | None = None) -> bool:
        """Whether all keys are there within so many seconds. Looks instead of waiting inside the store, so that signals are heard."""
        end, pause = time.monotonic() + seconds, PAUSES[0]
        while not self.store.check(keys):
            if time.monotonic() > end or (unless is not None and self.store.check([unless])):
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, PAUSES[1])
        return True


@contextlib.contextmanager
def open_exchange(seconds: float) -> Iterator[Exchange]:
    """Join the other processes by the variables that torchrun sets; alone without them. Raises OSError if there is no store to join."""
    exchange = _exchange(seconds)
    try:
        yield exchange
    finally:
        with contextlib.suppress(RuntimeError):  # the store has gone, and there is nothing left to say
            exchange.leave()


def _exchange(seconds: float) -> Exchange:
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size == 1:
        return Exchange(dist.HashStore(), 0, 1, seconds)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun's agent of the first node does
    try:
        store = dist.TCPStore(host, port, size, is_master=hosts, timeout=timedelta(seconds=_CONNECT_SECONDS), wait_for_workers=False)
    except RuntimeError as error:
        raise OSError(f"rank {rank}: the store at {host}:{port} does not answer ({str(error).splitlines()[0]})") from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Exchange(dist.PrefixStore(f"preflight/{attempt}", store), rank, size, seconds, hosts)


def _attempt(find: Callable) -> tuple:
    """(what it gives, no problem), or (None, what went wrong in one line)."""
    try:
        return find(), ""
    except Exception as error:  # whatever a driver, a disk or a library throws
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        return None, f"{type(error).__name__}: {reason} (in {Path(frame.filename).name}, line {frame.lineno})"
