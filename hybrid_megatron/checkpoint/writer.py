"""megatron-core's checkpoint writer, made to keep what the operating system says of a failed write.

By itself it keeps the type of the exception alone, and rank 0 leaves the collective calls when `.metadata` cannot be written, so that the
others wait for it. Here a failure is noted, the collective calls go on, and the caller discards the checkpoint on all ranks together.
"""

import contextlib
import queue
from collections.abc import Iterator

import hybrid_megatron.platform  # noqa: F401  before megatron.core
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync


@contextlib.contextmanager
def noting_write_errors() -> Iterator[list[str]]:
    """While it lasts, what the operating system says of writes of this process is put into the list."""
    noted: list[str] = []
    write, finish = FileSystemWriterAsync.write_preloaded_data, FileSystemWriterAsync.finish

    def noting_write(*arguments, **named):
        place, result = write(*arguments, **named)
        if isinstance(result, (OSError, RuntimeError)):  # torch's zip writer raises the second, sometimes over the first
            noted.append(_reason(result))
            _forget_frames(result)
            return place, []
        return place, result

    def noting_finish(self, metadata, results) -> None:
        try:
            finish(self, metadata, results)
        except OSError as error:
            noted.append(_reason(error))

    FileSystemWriterAsync.write_preloaded_data = staticmethod(noting_write)
    FileSystemWriterAsync.finish = noting_finish
    # Its results stay in this process: no helper process, which would take seconds to start and outlive a killed run.
    filesystem_async._results_queue = queue.Queue()
    try:
        yield noted
    finally:
        FileSystemWriterAsync.write_preloaded_data = staticmethod(write)
        FileSystemWriterAsync.finish = finish


def _forget_frames(error: BaseException | None) -> None:
    """Break the cycle of exception and frames that the writer leaves: collecting the buffers in it crashes CPython 3.12."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def _reason(error: BaseException) -> str:
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, OSError) and below.strerror:
            return below.strerror
        below = below.__cause__ or below.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
