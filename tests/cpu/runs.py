"""Runs as tests see them: the train command inside a living rank or as a process of its own, and what a run folder holds afterwards."""

import contextlib
import io
import os
import resource
import signal
import subprocess
import sys
import time
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hybrid_megatron.training.outcome import VARIABLE
from launch import train as train_command
from tests.cpu.cells import run_folder_metrics
from tests.cpu.ranks import Ranks

CHECKOUT = Path(__file__).resolve().parents[2]
MEASURED = (
    "step_seconds", "data_seconds", "tokens_per_second_per_gpu", "model_tflops_per_gpu", "peak_memory_gib", "checkpoint_stall_seconds",
)  # fmt: skip
"""Metrics that differ between two runs of the same computation."""


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit code and what it said on one rank."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """The lines of stderr, each of which must be one sentence of an error."""
        lines = self.err.splitlines()
        assert all(line.startswith("error: ") for line in lines), f"something stands before or behind the error:\n{self.err}"
        return [line.removeprefix("error: ") for line in lines]


def command(
    words: list[str],
    stop: tuple[int, int, str] | None = None,
    file_limit: int | None = None,
    file_limit_rank: int | None = None,
    outcome: Path | None = None,
) -> Ended:
    """`python -m launch train WORDS`, inside a rank.

    `stop` = (step, rank, name of a signal): this rank gets the signal in this step, or before the first for step 0. `file_limit`: no file
    may grow beyond this many bytes, on all ranks or on `file_limit_rank` alone. `outcome`: the file that is told how it ends.
    """
    out, err = io.StringIO(), io.StringIO()
    code = 0
    limited = file_limit if file_limit_rank in (None, int(os.environ["RANK"])) else None
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),  # what was said once in this process is said again
        unittest.mock.patch.dict(os.environ, {VARIABLE: str(outcome)} if outcome else {}),
        _signal_in_step(stop),
        _files_at_most(limited),
    ):
        try:
            train_command.main(words)
        except SystemExit as end:
            code = end.code
    return Ended(code, out.getvalue(), err.getvalue())


def train(ranks: Ranks, size: int, words: list[str], **how) -> Ended:
    """`command` on `size` ranks; they end alike, and rank 0 alone speaks."""
    ended = ranks.run(size, _command_with, words, how)
    assert len({each.code for each in ended}) == 1, ended
    assert not any(each.out or each.err for each in ended[1:]), ended
    return ended[0]


def _command_with(words: list[str], how: dict) -> Ended:
    return command(words, **how)


def train_and_watch(ranks: Ranks, size: int, words: list[str], **how) -> tuple[Ended, dict[int, list[bytes]]]:
    """`train`, and the samples that the ranks computed in each step (0-based), in their order."""
    answers = ranks.run(size, _watched, words, how)
    seen: dict[int, list[bytes]] = {}
    for _, samples in answers:  # ranks of one data-parallel group take consecutive parts
        for step, sample in samples:
            seen.setdefault(step, []).append(sample)
    return answers[0][0], seen


def _watched(words: list[str], how: dict) -> tuple[Ended, list[tuple[int, bytes]]]:
    from hybrid_megatron.data import BatchStream

    plain, samples = BatchStream.step, []

    def step(stream, number):
        for batch in plain(stream, number):
            samples.extend((number, row.numpy().tobytes()) for row in batch.tokens)
            yield batch

    with unittest.mock.patch.object(BatchStream, "step", step):
        return command(words, **how), samples


@contextlib.contextmanager
def _signal_in_step(stop: tuple[int, int, str] | None) -> Iterator[None]:
    from hybrid_megatron.training import loop

    plain, build = loop.train_step, loop.build_trainer

    def reached(step: int) -> None:
        if stop is not None and (step, int(os.environ["RANK"])) == stop[:2]:
            for _ in range(2):  # as Ctrl-C under torchrun does: from the terminal, and from torchrun
                signal.raise_signal(signal.Signals[stop[2]])

    def train_step(config, model, optimizer, stream, step, *more):
        reached(step + 1)
        return plain(config, model, optimizer, stream, step, *more)

    def build_trainer(*arguments):
        reached(0)
        return build(*arguments)

    with unittest.mock.patch.multiple(loop, train_step=train_step, build_trainer=build_trainer):
        yield


@contextlib.contextmanager
def _files_at_most(limit: int | None) -> Iterator[None]:
    """The operating system refuses to let a file grow further: EFBIG, which reaches the program as a full disk's ENOSPC does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Process:
    """`python -m launch train WORDS` as a person starts it; through torchrun where there are several processes.

    `module` is what is run instead of launch train; `outcome` the file that is told how it ends; `ignoring`
    starts it as a batch script does that ignores the signals meant for it; `restarts`: how often torchrun starts all again.
    """

    def __init__(
        self,
        words: list[str],
        processes: int = 1,
        module: tuple[str, ...] = ("launch", "train"),
        outcome: Path | None = None,
        ignoring: bool = False,
        restarts: int = 0,
    ):
        python = [sys.executable, "-m"]
        if processes > 1:
            python += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "--max-restarts", str(restarts), "-m"]
        path = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        if outcome is not None:
            environment[VARIABLE] = str(outcome)
        self.process = subprocess.Popen(
            [*python, *module, *words],
            cwd=CHECKOUT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_ignore if ignoring else None,
        )

    def wait_for(self, happened: Callable[[], bool], seconds: float = 300) -> None:
        """Until `happened()`; fails if the process ends before."""
        end = time.monotonic() + seconds
        while not happened():
            assert self.process.poll() is None, f"it ended too early: {self.process.communicate()}"
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.001)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def signal_all(self, number: int) -> None:
        """To the process and its children, as Ctrl-C in a terminal does."""
        os.killpg(self.process.pid, number)

    def end(self, seconds: float = 600) -> Ended:
        try:
            out, err = self.process.communicate(timeout=seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return Ended(self.process.returncode, out, err)


def _ignore() -> None:
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def computed(run_dir: Path) -> list[dict]:
    """The lines of metrics.jsonl without what is measured by the clock; every step stands there exactly once."""
    lines = run_folder_metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [{key: value for key, value in line.items() if key not in MEASURED} for line in lines]


def checkpoints(run_dir: Path) -> list[str]:
    """All that lies in the folder of checkpoints, leftovers included."""
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def contents(checkpoint: Path) -> dict:
    """Everything a checkpoint holds, by its keys: whole tensors, and other objects as they are."""
    reader = FileSystemReader(str(checkpoint))
    known = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(what.size, dtype=what.properties.dtype) if isinstance(what, TensorStorageMetadata) else None
        for key, what in known.items()
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint: parameters and optimizer state."""
    return {key: value for key, value in contents(checkpoint).items() if isinstance(value, torch.Tensor)}


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a folder with its time of change and contents, but for what says who had the folder and what its ranks did."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.match(".lock.*") and path.parent.name != "heartbeats"]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def differing(one: dict, other: dict) -> list[str]:
    """Keys that one of two checkpoints lacks, or whose values are not equal bit for bit."""
    return sorted(key for key in one.keys() | other.keys() if key not in one or key not in other or not equal(one[key], other[key]))


def equal(one, other) -> bool:
    """Bitwise equality of nested objects."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, io.BytesIO):
        return one.getvalue() == other.getvalue()
    return one == other
