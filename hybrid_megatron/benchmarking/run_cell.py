"""A cell in a process of its own: nothing of one measurement is left for the next, and what fails fails alone."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from queue import Queue
from threading import Lock

import psutil

from hybrid_megatron.benchmarking.cells import Cell

_MINUTES = 30
_MODULE = "hybrid_megatron.benchmarking.cell_process"


class Processes:
    """Those of measurements that run side by side; they end together, and none is started after that."""

    def __init__(self):
        self.running: set[subprocess.Popen] = set()
        self._lock, self._ended = Lock(), False

    def start(self, command: list[str], output, environment: dict[str, str]) -> subprocess.Popen:
        with self._lock:
            if self._ended:
                raise RuntimeError("the measurements have ended")
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | environment
            )  # fmt: skip
            self.running.add(process)
            return process

    def end(self) -> None:
        with self._lock:
            self._ended = True
            for process in self.running:
                kill(process)


def run_cell(cell: Cell, gpus: int, logs: Path, devices: str | None = None, beside: Processes | None = None) -> dict:
    """The cell's row (measure.py) with `name`, `recipe`, `peer`, `peers_like`, `context`, `round`, and `failed`: None, or in one line why
    there are no figures. What the process prints goes to a file in `logs`. Through torchrun on several GPUs. `devices`: which GPUs it
    sees, as CUDA_VISIBLE_DEVICES names them; None: all. `beside`: the processes it ends with."""
    title = " ".join([cell.name, str(cell.context), str(cell.round), *cell.overrides, f"on {gpus}"])
    log = logs / (re.sub(r"[^\w+.-]+", "_", title) + ".log")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "row.json"
        with log.open("w") as output:
            environment = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
            ending = _ending((beside or Processes()).start(_command(cell, gpus, result), output, environment))
        row = json.loads(result.read_text()) if result.exists() else {"failed": f"its process {ending}; {log} has what it printed"}
    same = {"name": cell.name, "recipe": cell.recipe, "peer": cell.peer, "peers_like": cell.peers_like}
    return same | {"context": cell.context, "round": cell.round, "failed": None} | row


def _command(cell: Cell, gpus: int, result: Path) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)] if gpus > 1 else []
    return [sys.executable, *torchrun, "-m", _MODULE, json.dumps(asdict(cell) | {"process_began": time.time()}), str(result)]


def run_side_by_side(
    cells: list[Cell], gpus: int, logs: Path, groups: list[str], processes: Processes | None = None
) -> Iterator[tuple[int, dict]]:
    """(place in `cells`, row) of each cell as it ends, as many at once as there are groups of GPUs."""
    processes = processes or Processes()
    free: Queue[str] = Queue()
    for group in groups:
        free.put(group)

    def run(place: int) -> tuple[int, dict]:
        group = free.get()
        try:
            return place, run_cell(cells[place], gpus, logs, group, processes)
        finally:
            free.put(group)

    pool = ThreadPoolExecutor(len(groups))
    try:
        for future in as_completed([pool.submit(run, place) for place in range(len(cells))]):
            yield future.result()
    finally:  # Ctrl-C as well
        pool.shutdown(wait=False, cancel_futures=True)
        processes.end()


def _ending(process: subprocess.Popen) -> str:
    """How the process ended, in words."""
    try:
        code = process.wait(60 * _MINUTES)
    except subprocess.TimeoutExpired:
        return f"was not done after {_MINUTES} minutes"
    finally:  # Ctrl-C as well
        kill(process)
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def kill(process: subprocess.Popen) -> None:
    """With all it has started: torchrun's ranks have sessions of their own, and outlive it."""
    if process.poll() is None:
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        for each in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
