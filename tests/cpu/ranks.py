"""A group of living processes in which tests run functions as ranks of any world size up to its own.

Importing torch and megatron-core takes seconds a process, so the processes live as long as the test session. A function runs with RANK,
WORLD_SIZE and the rest set as torchrun sets them, and starts and ends its own process groups.
"""

import fcntl
import gc
import multiprocessing
import multiprocessing.connection
import os
import random
import socket
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

_PATIENCE_SECONDS = 120.0
_PORTS = 3000
"""For each of the processes that run tests side by side."""


class Ranks:
    def __init__(self, size: int):
        self.size = size
        first = 20_000 + _PORTS * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 4)
        self.ports = range(first, first + _PORTS)
        self.port = random.choice(self.ports)
        self.locks = open(os.path.join(tempfile.gettempdir(), f"hybrid_megatron_ports_{os.getuid()}"), "a")
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for _ in range(self.size):
            ours, theirs = context.Pipe()
            # not a daemon: saving a checkpoint starts processes of its own
            process = context.Process(target=_serve, args=(theirs,))
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, size: int, function: Callable, *arguments: Any) -> list[Any]:
        """function(*arguments) on ranks 0 to size - 1; returns their results. The first exception of a rank is raised here, as text."""
        port = self._free_port()
        for rank, pipe in enumerate(self.pipes[:size]):
            pipe.send((rank, size, port, function, arguments))
        answers = self._answers(size)
        failures = [f"rank {rank}:\n{text}" for rank, (good, text) in sorted(answers.items()) if not good]
        assert not failures, "\n".join(failures)
        return [answers[rank][1] for rank in range(size)]

    def _free_port(self) -> int:
        """Of this test process's own, and below those that the system gives to connections: nobody takes it before the ranks do. Another
        set of tests on this machine would find its number's byte of a file locked."""
        fcntl.lockf(self.locks, fcntl.LOCK_UN, 1, self.port)
        while True:
            self.port = self.port + 1 if self.port + 1 < self.ports.stop else self.ports.start
            with socket.socket() as free:
                try:
                    fcntl.lockf(self.locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.port)
                    free.bind(("127.0.0.1", self.port))
                    return self.port
                except OSError:
                    continue

    def _answers(self, size: int) -> dict[int, tuple[bool, Any]]:
        """By rank. Those that wait for one that has failed are ended, and new processes take the place of all."""
        left, answers = {pipe: rank for rank, pipe in enumerate(self.pipes[:size])}, {}
        while left:
            failed = not all(good for good, _ in answers.values())
            ready = multiprocessing.connection.wait(list(left), timeout=_PATIENCE_SECONDS if failed else None)
            if not ready:
                for process in self.processes:
                    process.kill()
                self._start()
                break
            for pipe in ready:
                answers[left.pop(pipe)] = pipe.recv()
        return answers

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(timeout=20)
            if process.is_alive():
                process.kill()


def _serve(pipe) -> None:
    import torch

    torch.set_num_threads(1)
    frozen = False
    while (task := pipe.recv()) is not None:
        rank, size, port, function, arguments = task
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )  # fmt: skip
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        # Groups that have ended keep their threads, 60 a rank, each of which wakes all the time, until nothing refers to them. A model
        # falls at the second collection, when what held it in C++ is gone.
        for _ in range(3):
            gc.collect()
        if not frozen:
            gc.freeze()  # the modules: they need not be looked through again
            frozen = True
