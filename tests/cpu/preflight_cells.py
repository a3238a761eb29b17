"""What runs inside the ranks of the tests of preflight: the command, on nodes of any number of ranks, with one of them made to differ."""

import contextlib
import importlib
import io
import os
import subprocess
import sys
import time
import unittest.mock
from dataclasses import dataclass
from pathlib import Path

from hybrid_megatron.errors import DataError
from hybrid_megatron.preflight.file_systems import FileSystem
from hybrid_megatron.preflight.gpus import Device
from hybrid_megatron.preflight.speed import Speed
from launch import preflight as preflight_command

FILES = ("HYBRID_MEGATRON_PREFLIGHT", "HYBRID_MEGATRON_BAD_NODES")
LAST = 3
"""The rank that is made to differ."""


@dataclass(frozen=True)
class Said:
    """How the command ended on one rank, and after how many seconds."""

    code: int
    out: str
    err: str
    seconds: float = 0.0

    def line(self, what: str) -> str:
        """The one line of the report that begins with these words."""
        [line] = [line for line in self.out.splitlines() if line.startswith(f"{what:<11}")]
        return line[11:]


def command(words: list[str], per_node: int = 4, environment: dict | None = None, pretend: str = "", size: int | None = None) -> Said:
    """`python -m launch preflight WORDS` inside a rank.

    `per_node`: ranks r with equal r // per_node are on one node. `size`: number of ranks the job believes in. `pretend`: see `_pretended`.
    """
    rank = int(os.environ["RANK"])
    changed = {"SLURMD_NODENAME": f"node{rank // per_node + 1}", "LOCAL_RANK": str(rank % per_node)} | (environment or {})
    if size is not None:
        changed["WORLD_SIZE"] = str(size)
    out, err, code = io.StringIO(), io.StringIO(), 0
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(unittest.mock.patch.dict(os.environ, changed))
        for name, value in _pretended(pretend, rank).items():
            module, attribute = name.split()
            stack.enter_context(
                unittest.mock.patch.object(importlib.import_module(f"hybrid_megatron.preflight.{module}"), attribute, value)
            )
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        stack.enter_context(unittest.mock.patch.object(os, "_exit", sys.exit))  # a stuck thread does not keep a living rank from going on
        try:
            preflight_command.main(words)
        except SystemExit as end:
            code = end.code
    return Said(code, out.getvalue(), err.getvalue(), time.monotonic() - began)


def _pretended(what: str, rank: int) -> dict:
    """ "module name" -> what this rank finds in its place."""
    if what == "slow":  # verdicts as of GPUs, and one that multiplies at half the others' speed
        gpu = Device("NVIDIA H200", True, 2, "", 140 * 2**30, 139 * 2**30)
        speed = Speed(350.0 if rank == LAST else 700.0, 4200.0, 1e9)
        return {"facts gather_device": lambda *_: gpu, "run gather_speed": lambda: speed}
    if what == "driver everywhere":
        return {"run gather_speed": _broken_driver}
    if what.startswith("no data"):
        shared = {"seen file_system_of": lambda path: FileSystem("nfs4", "/data")} if what.endswith("nfs") else {}
        return shared | ({"data open_dataset": _no_dataset} if rank == LAST else {})
    if rank != LAST:
        return {"run LINK_SECONDS": 5.0} if what == "stays away" else {}
    return {
        "": {},
        "driver": {"facts gather_device": _broken_driver},
        "dies": {"facts gather_device": _dies},
        "stays away": {"run LINK_SECONDS": 5.0, "links _bus_bandwidth": lambda group, size: time.sleep(30)},
    }[what]


def _no_dataset(config, split):
    raise DataError(f"data.{split}={getattr(config.data, split)}: it does not exist")


def _broken_driver(*_):
    raise RuntimeError("CUDA error: unknown error")


def _dies(*_):
    raise SystemExit(77)


def torchrun(checkout: Path, words: list[str], environment: dict) -> Said:
    """The command as two processes of torchrun."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")} | environment
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = subprocess.run(
        [*torchrun, "launch", "preflight", *words], cwd=checkout, env=environment, capture_output=True, text=True, timeout=120
    )
    return Said(done.returncode, done.stdout, done.stderr)
