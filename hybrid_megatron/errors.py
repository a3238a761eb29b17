"""What a user did wrong, said in one clear sentence.

Every message names the setting or file, its value, the rule, and the way out. Commands print it without a traceback and exit with
code 2 (`exit_with_code_2`). Broken invariants of our own code are assertions instead and do show a traceback.
"""

import contextlib
import os
import shlex
import sys
import time
import warnings
from pathlib import Path

from hybrid_megatron.command_line import interpreter

_FIRST_WORD_SECONDS = 3.0
"""How long a silent process waits before it ends: torchrun ends all others with the first, and the one that speaks must come before."""


class UserError(Exception):
    """Base of everything a user can mend; the message is meant to be read by that user."""


class ConfigError(UserError):
    """A recipe or an override breaks one or more rules. `problems` holds one sentence for each."""

    def __init__(self, problems: str | list[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(UserError):
    """A dataset, tokenizer or input file is missing, damaged or does not fit the recipe."""


class NoIndexMaps(DataError):
    """A dataset has no index maps for a recipe. `of_recipe` says how to make them, where the recipe's words are known."""

    def __init__(self, problem: str, words: list[str] | None = None):
        self.problem = problem
        told = shlex.join(words) if words else "RECIPE [the same overrides]"
        super().__init__(f"{problem}; make them once with: {interpreter()} -m data_prep build-cache {told}")

    def of_recipe(self, words: list[str]) -> "NoIndexMaps":
        """The same with the words as they were typed."""
        return NoIndexMaps(self.problem, words)


class CheckpointError(UserError):
    """A checkpoint cannot be written, is damaged, or does not fit the model."""


class RunError(UserError):
    """A run cannot start or go on: the run folder is in use, the loss is not a number, ..."""


class NodeError(RunError):
    """This node is such that a run cannot start on it. Others may be well, so the first process of each node that is not says so."""


@contextlib.contextmanager
def exit_with_code_2(speaks: bool = True):
    """Turn a `UserError` into `error: ...` on stderr and exit code 2, and an interrupt into one line and 130. Only `speaks` prints.

    What is wrong with one node alone is said by its first process.
    """
    try:
        with _plain_warnings(speaks):
            yield
    except UserError as error:
        if speaks or (isinstance(error, NodeError) and os.environ.get("LOCAL_RANK", "0") == "0"):
            for line in str(error).splitlines():
                print(f"error: {line}", file=sys.stderr, flush=True)
        elif "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(_FIRST_WORD_SECONDS)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        if speaks:
            print("stopped    by SIGINT, nothing lost", file=sys.stderr, flush=True)
        raise SystemExit(130) from None


@contextlib.contextmanager
def _plain_warnings(speaks: bool):
    """Show what this package warns of as `warning: ...`, without the line of code it comes from; others' warnings as ever."""
    show = warnings.showwarning
    ours = str(Path(__file__).parent)

    def plain(message, category, filename, lineno, file=None, line=None):
        if not filename.startswith(ours):
            show(message, category, filename, lineno, file, line)
        elif speaks:
            print(f"warning: {message}", file=sys.stderr, flush=True)

    warnings.showwarning = plain
    try:
        yield
    finally:
        warnings.showwarning = show
