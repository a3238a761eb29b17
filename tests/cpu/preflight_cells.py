"""What runs inside the ranks of the tests of preflight: the command, on nodes of any number of ranks, with one of them made to differ."""

import contextlib
import io
import os
import sys
import threading
import time
import unittest.mock
from dataclasses import dataclass
from pathlib import Path

from hybrid_megatron.errors import DataError
from hybrid_megatron.preflight import files, links, nodes, run
from hybrid_megatron.preflight.gpus import Device
from hybrid_megatron.preflight.speed import Speed
from launch import preflight as preflight_command

LAST = 3
"""The rank that is made to differ."""


@dataclass(frozen=True)
class Said:
    """How the command ended on one rank."""

    code: int
    out: str
    err: str

    def lines(self, what: str) -> list[str]:
        """Lines of the report of this kind."""
        return [line[11:] for line in self.out.splitlines() if line.startswith(f"{what:<11}")]

    @property
    def verdict(self) -> str:
        [verdict] = self.lines("verdict")
        return verdict


def command(words: list[str], per_node: int = 4, environment: dict | None = None, pretend: str = "", believed: int | None = None) -> Said:
    """`python -m launch preflight WORDS` inside a rank.

    `per_node`: ranks r with equal r // per_node are on one node.
    `believed`: number of ranks the job believes in. `pretend`: see `_pretended`.
    """
    rank = int(os.environ["RANK"])
    changed = {"SLURMD_NODENAME": f"node{rank // per_node + 1}", "LOCAL_RANK": str(rank % per_node)} | (environment or {})
    if believed is not None:
        changed["WORLD_SIZE"] = str(believed)
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(unittest.mock.patch.dict(os.environ, changed))
        for (module, name), value in ({(run, "AGAIN_SECONDS"): 0.2} | _pretended(pretend, rank)).items():
            stack.enter_context(unittest.mock.patch.object(module, name, value))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        stack.enter_context(unittest.mock.patch.object(os, "_exit", sys.exit))  # a stuck thread does not keep a living rank from going on
        try:
            preflight_command.main(words)
        except SystemExit as end:
            code = end.code
    for thread in threading.enumerate():  # a later test has process groups of its own
        if thread.name == links.THREAD:
            thread.join()
    return Said(code, out.getvalue(), err.getvalue())


def _pretended(what: str, rank: int) -> dict:
    """(module, name) -> what this rank finds in its place."""
    gpu = Device("NVIDIA H200", 2, False, 140 * 2**30, 139 * 2**30, ("0", "No", "No"))
    if what.startswith("slow"):  # verdicts as of GPUs, and one that multiplies at half the others' speed, always or once
        fast, slow = Speed(700.0, 4200.0, 1e9), Speed(350.0, 4200.0, 1e9)
        speeds = iter([slow, fast if what == "slow once" else slow] if rank == LAST else [fast, fast])
        return {
            (nodes, "gather_device"): lambda _: gpu,
            (run, "gather_speed"): lambda: next(speeds),
            (links, "_bus_bandwidth"): lambda *_: 300.0,
        }
    if what == "half without":  # the second node's GPUs have gone
        return {(nodes, "gather_device"): lambda _: gpu if rank < 2 else Device("CPU")}
    if what == "driver everywhere":
        return {(run, "gather_speed"): _broken_driver}
    if what.startswith("no data"):
        shared = {(files, "is_shared"): lambda path: what.endswith("shared")}
        return shared | ({(files, "open_dataset"): _no_dataset} if rank == LAST else {})
    if what == "stays away":
        limits = {(run, "LINK_SECONDS"): 3.0, (links, "_LATER"): 1.5}
        return limits | ({(links, "_bus_bandwidth"): _comes_late} if rank == LAST else {})
    if what == "absent":
        return {(run, "WAIT_SECONDS"): 3.0}
    if what == "dies":
        return {(run, "WAIT_SECONDS"): 3.0} | ({(nodes, "gather_device"): _dies} if rank == LAST else {})
    return {(nodes, "gather_device"): _broken_driver} if what == "driver" and rank == LAST else {}


def _no_dataset(config, split):
    raise DataError(f"data.{split}={getattr(config.data, split)}: it does not exist")


def _broken_driver(*_):
    raise RuntimeError("CUDA error: unknown error")


def _comes_late(*_):
    time.sleep(5)
    raise RuntimeError("the others have gone")


def _dies(*_):
    raise SystemExit(77)


def names_left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
