"""What runs inside the ranks of checkpoint tests: trainers that are saved, loaded and saved again without the loop around them."""

import collections
import contextlib
import threading
import time
import unittest.mock
from collections.abc import Iterator
from pathlib import Path

from hybrid_megatron import platform
from hybrid_megatron.checkpoint import writer
from hybrid_megatron.checkpoint.choose import newest_whole
from hybrid_megatron.checkpoint.content import held_params, run_content
from hybrid_megatron.checkpoint.load import load_checkpoint
from hybrid_megatron.checkpoint.saver import Saver
from hybrid_megatron.checkpoint.sizes import gather_bytes
from hybrid_megatron.checkpoint.store import CheckpointStore, Progress
from hybrid_megatron.config import RunConfig, load_recipe
from hybrid_megatron.config.validate import validate
from hybrid_megatron.data import open_dataset
from hybrid_megatron.parallel import ParallelState, start
from hybrid_megatron.parallel.state import world_size
from hybrid_megatron.training.build import Trainer, build_trainer
from hybrid_megatron.training.optimizer import set_hyperparameters
from hybrid_megatron.training.stability import Stability
from hybrid_megatron.training.step import train_step
from tests.cpu.plan_cells import Allocated
from tests.cpu.runs import Ended, command


@contextlib.contextmanager
def _trainer(words: list[str]) -> Iterator[tuple[RunConfig, ParallelState, Trainer]]:
    config = load_recipe(words)
    validate(config, world_size())
    platform.select_device()
    with start(config.parallel, config.seed) as state:
        yield config, state, build_trainer(config, state, open_dataset(config, "train"), None)


def _step(config: RunConfig, trainer: Trainer, number: int) -> None:
    set_hyperparameters(trainer.optimizer, 1e-3, config.optimizer.weight_decay)
    train_step(config, trainer.model, trainer.optimizer, trainer.train_stream, number, trainer.state, Stability(config).judge)


def _save(trainer: Trainer, folder: Path, step: int, form: str, wait: bool = True) -> Saver:
    told = []
    saver = Saver(
        CheckpointStore(folder),
        trainer.config.checkpoint,
        trainer.model,
        trainer.optimizer,
        trainer.state,
        lambda kind, **facts: told.append((kind, facts)),
    )
    progress = Progress(step, 512 * step, trainer.state.layout, trainer.train_stream.dataset.fingerprint, form)
    saver.save(f"step_{step:08d}", progress, 0, wait=wait)
    return saver


def save_both_forms(words: list[str], rolling: Path, permanent: Path, steps: int = 3) -> None:
    """Train, and save one state in both forms, a folder for each."""
    with _trainer(words) as (config, _, trainer):
        for number in range(steps):
            _step(config, trainer, number)
        _save(trainer, rolling, steps, "rolling")
        _save(trainer, permanent, steps, "permanent")


def load_and_save_permanently(words: list[str], source: Path, target: Path) -> None:
    """What a trainer of this layout has after loading the newest checkpoint of `source`, as a permanent checkpoint in `target`."""
    with _trainer(words) as (_, state, trainer):
        chosen = newest_whole(CheckpointStore(source), state)
        load_checkpoint(chosen, trainer.model, trainer.optimizer, state)
        _save(trainer, target, chosen.progress.step, "permanent")


def save_while_training(words: list[str], folders: dict[str, Path], form: str) -> list[bool]:
    """Save one state at once into `at_once`, and into `beside` while three more steps change it; whether the latter was ever under way."""
    with _trainer(words) as (config, _, trainer):
        for number in range(2):
            _step(config, trainer, number)
        _save(trainer, folders["at_once"], 2, form)
        with held_writers():
            saver = _save(trainer, folders["beside"], 2, form, wait=False)
            going = []
            for number in range(2, 5):
                going.append(bool(saver.writing))
                _step(config, trainer, number)
            saver.wait()
        return going


@contextlib.contextmanager
def slow_writers(seconds: float) -> Iterator[None]:
    """Each rank's file takes so much longer to write."""
    plain = writer._write_file

    def slow(*arguments):
        time.sleep(seconds)
        return plain(*arguments)

    with unittest.mock.patch.object(writer, "_write_file", slow):
        yield


@contextlib.contextmanager
def held_writers() -> Iterator[None]:
    """No rank's file is written before training waits for it."""
    plain_write, plain_wait = writer._write_file, writer.Writing.wait
    waited_for: dict[str, threading.Event] = collections.defaultdict(threading.Event)

    def write(transforms, index, bucket, *rest):
        assert waited_for[bucket[0]].wait(60), "nobody waits"
        return plain_write(transforms, index, bucket, *rest)

    def wait(writing, seconds):
        waited_for[writing.path].set()
        plain_wait(writing, seconds)

    with unittest.mock.patch.object(writer, "_write_file", write), unittest.mock.patch.object(writer.Writing, "wait", wait):
        yield


def train_with_held_writers(words: list[str], how: dict) -> Ended:
    with held_writers():
        return command(words, **how)


def train_with_little_memory(words: list[str], free: int, how: dict) -> Ended:
    """The host has so many bytes of memory free."""
    with unittest.mock.patch.object(platform, "available_host_memory", lambda: free):
        return command(words, **how)


def most_memory_of_a_gather(words: list[str]) -> tuple[int, int]:
    """Bytes of tensors on the host at once while the content of a permanent checkpoint is made, and what sizes.py says."""
    with _trainer(words) as (config, state, trainer):
        _step(config, trainer, 0)
        with Allocated() as held:
            run_content(trainer.model, trainer.optimizer, state, "permanent")
        return held.most, gather_bytes(held_params(trainer.model), state.groups.dp_cp.size())
