"""A run that is killed again and again at random moments of a job's life, and what it lost each time."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.cluster import wait_until
from tests.slurm.jobs import OVER, Training

INTERVAL = 10
"""Steps between two checkpoints."""
IN_A_START = 0.2
"""Part of the kills that fall into a start: imports, loading, the first step."""
VICTIMS = {"rank": 68, "torchrun": 15, "step": 15, "node": 2}
"""How often each is killed: the training process, with torchrun, with node.sh too, the node."""


@dataclass(frozen=True)
class Kill:
    """One of them."""

    what: str
    step: int
    """Steps that metrics.jsonl had."""
    kept: int
    """Step of the newest whole checkpoint."""

    @property
    def lost(self) -> int:
        return self.step - self.kept


class Soak:
    """`kills` lists what was done, `jobs` the jobs that it took: one that gives up, as it should, is submitted again."""

    def __init__(self, training: Training, seed: int, say: Callable[[str], None]):
        self.training, self.chance, self.say = training, random.Random(seed), say
        self.kills: list[Kill] = []
        self.jobs = [training.submit()]
        self._last = 0

    def run(self, count: int) -> None:
        while len(self.kills) < count:
            self._wait_for_a_start()
            self._wait_for_a_moment()
            if _alive(self._last):
                self._kill(self.chance.choices(list(VICTIMS), list(VICTIMS.values()))[0])
        while self.training.cluster.wait_for_state(self.training.job, *OVER, seconds=900) != "COMPLETED":
            self._submit_again()

    def _submit_again(self) -> None:
        assert "error: given up" in self.training.log, self.training.log
        self.jobs.append(self.training.submit())

    def _wait_for_a_start(self) -> None:
        def started() -> bool:
            state = self.training.cluster.state(self.training.job)
            assert state != "COMPLETED", "the run is too short for so many kills"
            if state in OVER:
                self._submit_again()
            found = self.training.cluster.processes(self.training.job, rank=0)
            new = bool(found) and found[0] != self._last
            self._last = found[0] if new else self._last
            return new

        wait_until(started, "the next start", 400, lambda: self.training.log[-2000:])

    def _wait_for_a_moment(self) -> None:
        if self.chance.random() < IN_A_START:
            time.sleep(self.chance.uniform(0, 10))
            return
        steps = self.chance.randint(0, 3 * INTERVAL)
        outcome = self.training.run / f"logs/job_{self.training.job}/outcome"
        while _alive(self._last) and not outcome.is_file():
            time.sleep(0.05)
        with contextlib.suppress(OSError, IndexError, ValueError):
            steps += int(outcome.read_text().split()[1])
        while _alive(self._last) and self.training.steps < steps:
            time.sleep(0.001)
        time.sleep(self.chance.uniform(0, 0.05))

    def _kill(self, what: str) -> None:
        if what == "node":
            node = self.training.cluster.job(self.training.job)["NodeList"]
            self.training.cluster.power_off(node)
            self.training.cluster.power_on(node)
        else:
            victims = [self._last, *_parents(self._last)]
            for process in {"rank": victims[:1], "torchrun": victims[:2], "step": victims[:3]}[what]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        wait_until(lambda: not _alive(self._last), "it is dead", 30)
        whole = [int(path.name[5:]) for path in self.training.run.glob("checkpoints/step_*[0-9]")]
        kill = Kill(what, self.training.steps, max(whole, default=0))
        self.kills.append(kill)
        self.say(f"kill {len(self.kills):3}   {what:8} step {kill.step:5}   whole checkpoint {kill.kept:5}   lost {kill.lost:3}")


def _alive(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _parents(process: int) -> list[int]:
    """torchrun, node.sh, and further up."""
    found = []
    while process > 1:
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(process)
    return found
