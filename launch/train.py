"""python -m launch train RECIPE [section.key=value ...]

RECIPE is a YAML file or fragments joined by +, e.g. 776m+gdn_nope_lh+pretrain_4k. Alone it runs on one device; with
`torchrun --nproc-per-node N -m launch train ...` on N. The same command resumes an interrupted run.
Every setting, its unit and meaning: hybrid_megatron/config/schema.py; their values: recipes/.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hybrid_megatron.errors import NoIndexMaps, UserError, exit_with_code_2
from hybrid_megatron.training.outcome import Outcome, tell_nothing, tell_refused
from hybrid_megatron.training.signals import stop_on_signals
from launch.words import help_if_asked


def main(words: list[str]) -> None:
    help_if_asked(__doc__, words)
    # Signals first: reading the recipe takes a second, and importing torch and megatron-core many.
    with exit_with_code_2(speaks=os.environ.get("RANK", "0") == "0"), stop_on_signals() as stop, _refusals_told():
        from hybrid_megatron.config import load_recipe

        config = load_recipe(words)
        from hybrid_megatron.training.loop import train

        try:
            outcome = train(config, stop)
        except NoIndexMaps as error:
            raise error.of_recipe(words) from None
    exit_unless_complete(outcome)


@contextmanager
def _refusals_told() -> Iterator[None]:
    tell_nothing()
    try:
        yield
    except UserError as error:
        tell_refused(error)
        raise


def exit_unless_complete(outcome: Outcome) -> None:
    """A run stopped by a signal exits as a shell expects of one: 130 after SIGINT, 138 after SIGUSR1, 143 after SIGTERM."""
    if not outcome.complete:
        raise SystemExit(128 + signal.Signals[outcome.stopped_by])


if __name__ == "__main__":
    main(sys.argv[1:])
