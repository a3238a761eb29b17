"""How a call of `train` ended, and the file that tells it to whoever started the process.

The environment variable HYBRID_MEGATRON_OUTCOME names that file; rank 0 alone writes it, atomically, one line:

    running STEP        training has begun or resumed, STEP optimizer steps being done already
    complete            the token budget is spent
    stopped SIGNAME     stopped by SIGUSR1, SIGTERM or SIGINT, with nothing lost
    refused SENTENCE    a UserError: trying again would end alike

No file, or still `running STEP`: the run crashed, was killed or hung, and trying again makes sense. Imports nothing heavy, so that what
goes wrong with a recipe is told as well.
"""

import contextlib
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from hybrid_megatron.errors import UserError

VARIABLE = "HYBRID_MEGATRON_OUTCOME"


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended."""

    run_dir: Path
    step: int
    """Steps done in all."""
    complete: bool
    stopped_by: str | None = None
    """The signal that stopped it, if one did."""


def tell_nothing() -> None:
    """Remove what an earlier process told: a crash from here on must not look like its end."""
    if (path := _path()) is not None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def tell_running(step: int) -> None:
    _tell(f"running {step}")


def tell_end(outcome: Outcome) -> Outcome:
    _tell("complete" if outcome.complete else f"stopped {outcome.stopped_by}")
    return outcome


def tell_refused(error: UserError) -> None:
    _tell(f"refused {'; '.join(str(error).splitlines())}")


def _tell(line: str) -> None:
    if (path := _path()) is None:
        return
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(line + "\n")
        new.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        if not _overwritten(path, line):
            warnings.warn(f"{VARIABLE}={path}: cannot be written ({error.strerror}), so it does not say: {line}")


def _overwritten(path: Path, line: str) -> bool:
    """On a full disk, which may be what is to be told, a file that is there already has room for a line."""
    try:
        with open(path, "r+") as file:
            file.write(line + "\n")
            file.truncate()
        return True
    except OSError:
        return False


def _path() -> Path | None:
    """The file, where this process is to write one."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named and os.environ.get("RANK", "0") == "0" else None
