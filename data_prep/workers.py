"""Shards over processes: each takes one shard after the other from the parent, which knows at any moment who has which."""

import contextlib
import ctypes
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from data_prep.compression import STANDARD_INPUT
from data_prep.gigatoken_encoder import applies, prepare, said
from data_prep.inputs import Shard
from data_prep.part import Job, make_part
from data_prep.tokenizer_base import Tokenizer
from data_prep.tokenizers import load_encoder
from hybrid_megatron.errors import DataError, UserError

_PR_SET_PDEATHSIG = 1
_CRASHES = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGILL, -signal.SIGBUS)


def make_parts(
    job: Job,
    named: Tokenizer,
    shards: Sequence[Shard],
    processes: int,
    threads: int,
    on_progress: Callable[[Shard, int, int, int], None],
    on_encoder: Callable[[str], None],
) -> None:
    """Make the parts of `shards`; here where one process is asked for, unless its encoder might take it down.

    `named` is the job's tokenizer as it is loaded here. `on_progress` gets a shard and its bytes read, documents and tokens so far;
    `on_encoder` what encodes. Raises `DataError` with the first failure, also where a process is killed, after the others are stopped;
    parts that were finished stay.
    """
    reads_stdin = any(STANDARD_INPUT in shard.files for shard in shards)
    if processes == 1 and (reads_stdin or not applies(named, job.encoder)):
        tokenizer = load_encoder(job.tokenizer, threads, job.encoder)
        on_encoder(said(tokenizer, job.encoder))
        for shard in shards:
            make_part(job, tokenizer, shard, threads, lambda *counts, shard=shard: on_progress(shard, *counts))
        return
    workers = [_Worker(job, threads) for _ in range(processes)]
    waiting = list(reversed(shards))
    try:
        for worker in workers:
            worker.start()
        prepared = prepare(named, job.encoder)  # while they import
        for worker in workers:
            worker.send(prepared)
            worker.give(waiting.pop() if waiting else None)
        while busy := [worker for worker in workers if worker.shard is not None]:
            wait([worker.connection for worker in busy] + [worker.process.sentinel for worker in busy])
            for worker in busy:
                for word, content in worker.messages():
                    if word == "progress":
                        on_progress(worker.shard, *content)
                    elif word == "encoder":
                        on_encoder(content)
                    elif word == "done":
                        worker.give(waiting.pop() if waiting else None)
                    elif word == "refused":
                        raise DataError(content)
                    else:
                        raise RuntimeError(f"while {worker.shard} was tokenized:\n{content}")
    finally:
        for worker in workers:
            worker.stop()


class _Worker:
    """The parent's side of a process."""

    def __init__(self, job: Job, threads: int):
        self.encoder = job.encoder
        # A fresh interpreter: this one may have threads, which a fork would leave behind in the middle of something.
        context = multiprocessing.get_context("spawn")
        self.connection, self._theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_work, args=(job, threads, self._theirs), daemon=True)
        self.shard: Shard | None = None

    def start(self) -> None:
        self.process.start()
        self._theirs.close()

    def give(self, shard: Shard | None) -> None:
        self.shard = shard
        self.send(shard)

    def send(self, what: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # then `messages` tells
            self.connection.send(what)

    def messages(self) -> Iterator[tuple]:
        """What has arrived. Raises `DataError` where the process is gone and left its shard."""
        try:
            while self.shard is not None and self.connection.poll():
                yield self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise DataError(self._died()) from None

    def stop(self) -> None:
        if self.process.pid is None:
            return
        self.connection.close()
        if self.shard is not None:
            self.process.terminate()
        self.process.join()

    def _died(self) -> str:
        code = self.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with exit code {code}"
        hint = " (the usual reason is memory: use fewer --processes)" if code == -signal.SIGKILL else ""
        if code in _CRASHES and self.encoder != "tiktoken":
            hint = " (if the encoder gigatoken is at work and this happens again, add --encoder tiktoken)"
        return f"the process that tokenized {self.shard} {how}{hint}; finished parts are kept, so run the same command again"


def _work(job: Job, threads: int, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which stops this process
    _die_with_parent()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        try:
            tokenizer = load_encoder(job.tokenizer, threads, job.encoder, connection.recv())
            connection.send(("encoder", said(tokenizer, job.encoder)))
            while (shard := connection.recv()) is not None:
                make_part(job, tokenizer, shard, threads, lambda *counts: connection.send(("progress", counts)))
                connection.send(("done", None))
        except UserError as error:
            connection.send(("refused", str(error)))
        except OSError:
            raise
        except Exception:
            connection.send(("crashed", traceback.format_exc()))


def _die_with_parent() -> None:
    """On Linux, end at once when the parent is killed; elsewhere the next message to it ends this process."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
