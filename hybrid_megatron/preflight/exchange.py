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
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

_PAUSES = (0.002, 0.05)
"""Shortest and longest pause in seconds between two looks."""
_FAREWELL_SECONDS = 10.0


class Silent(Exception):
    """Some ranks did not answer in time."""

    def __init__(self, topic: str, ranks: list[int]):
        super().__init__(f"{topic}: no answer from ranks {ranks}")
        self.topic = topic
        self.ranks = ranks


class Exchange:
    def __init__(self, store: dist.Store, rank: int, size: int, seconds: float, hosts: bool = False):
        """`seconds`: how long ranks wait for each other. `hosts`: the store lives in this process."""
        self.store, self.rank, self.size, self.seconds, self.hosts = store, rank, size, seconds, hosts

    def of_all(self, topic: str, value) -> list:
        """Every rank's value (any picklable object), on every rank. Raises Silent, on every rank that is still there."""
        self.tell(f"{topic}/{self.rank}", value)
        keys = [f"{topic}/{rank}" for rank in range(self.size)]
        given_up = f"{topic}/silent"
        if not self._appears(keys, self.seconds, unless=given_up):
            silent = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        else:
            silent = []
        silent = json.loads(self.store.compare_set(given_up, "", json.dumps(silent)))
        if silent:
            raise Silent(topic, silent)
        return [pickle.loads(self.store.get(key)) for key in keys]

    def heard(self, topic: str) -> dict:
        """The values of those ranks that have put theirs down so far, by rank."""
        keys = {rank: f"{topic}/{rank}" for rank in range(self.size)}
        return {rank: pickle.loads(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}

    def tell(self, key: str, value) -> None:
        """Put down one value for whoever asks for it."""
        self.store.set(key, pickle.dumps(value))

    def told(self, key: str, seconds: float | None = None):
        """A value that another rank tells; raises TimeoutError."""
        if not self._appears([key], self.seconds if seconds is None else seconds):
            raise TimeoutError(f"{key} is not told")
        return pickle.loads(self.store.get(key))

    def leave(self) -> None:
        """The process that hosts the store stays until the others need it no more."""
        self.store.set(f"left/{self.rank}", b"")
        if self.hosts:
            self._appears([f"left/{rank}" for rank in range(self.size)], _FAREWELL_SECONDS)

    def _appears(self, keys: list[str], seconds: float, unless: str | None = None) -> bool:
        """Whether all keys are there within so many seconds. Looks instead of waiting inside the store, so that signals are heard."""
        end, pause = time.monotonic() + seconds, _PAUSES[0]
        while not self.store.check(keys):
            if time.monotonic() > end or (unless is not None and self.store.check([unless])):
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, _PAUSES[1])
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
        store = dist.TCPStore(host, port, size, is_master=hosts, timeout=timedelta(seconds=seconds), wait_for_workers=False)
    except RuntimeError as error:
        raise OSError(f"rank {rank}: the store at {host}:{port} does not answer ({str(error).splitlines()[0]})") from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Exchange(dist.PrefixStore(f"preflight/{attempt}", store), rank, size, seconds, hosts)
