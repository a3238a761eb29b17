"""A cell in a process of its own: nothing of one measurement is left for the next, and what fails fails alone."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from hybrid_megatron.benchmarking.cells import Cell

_MINUTES = 30
_MODULE = "hybrid_megatron.benchmarking.cell_process"


def run_cell(cell: Cell, gpus: int, logs: Path) -> dict:
    """The cell's row (measure.py) with `name`, `recipe`, `peer`, `peers_like`, `context`, `round`, and `failed`: None, or in one line why
    there are no figures. What the process prints goes to a file in `logs`. Through torchrun on several GPUs."""
    title = " ".join([cell.name, str(cell.context), str(cell.round), *cell.overrides, f"on {gpus}"])
    log = logs / (re.sub(r"[^\w+.-]+", "_", title) + ".log")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "row.json"
        with log.open("w") as output:
            ending = _run(_command(cell, gpus, result), output)
        row = json.loads(result.read_text()) if result.exists() else {"failed": f"its process {ending}; {log} has what it printed"}
    same = {"name": cell.name, "recipe": cell.recipe, "peer": cell.peer, "peers_like": cell.peers_like}
    return same | {"context": cell.context, "round": cell.round, "failed": None} | row


def _command(cell: Cell, gpus: int, result: Path) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)] if gpus > 1 else []
    return [sys.executable, *torchrun, "-m", _MODULE, json.dumps(asdict(cell) | {"process_began": time.time()}), str(result)]


def _run(command: list[str], output) -> str:
    """How the process ended, in words."""
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        code = process.wait(60 * _MINUTES)
    except subprocess.TimeoutExpired:
        return f"was not done after {_MINUTES} minutes"
    finally:  # Ctrl-C as well: torchrun and its ranks end with it
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
