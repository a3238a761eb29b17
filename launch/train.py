"""python -m launch train RECIPE [section.key=value ...]

RECIPE is a YAML file or fragments joined by +, e.g. 776m+gdn_nope_lh+pretrain_4k. Alone it runs on one device; with
`torchrun --nproc-per-node N -m launch train ...` on N. The same command resumes an interrupted run.
Every setting, its unit and meaning: hybrid_megatron/config/schema.py; their values: recipes/.
"""

import os
import signal
import sys

from hybrid_megatron.config import load_recipe
from hybrid_megatron.errors import NoIndexMaps, exit_with_code_2


def main(words: list[str]) -> None:
    if not words or {"-h", "--help"} & set(words):
        print(__doc__.strip())
        raise SystemExit(0 if words else 2)
    with exit_with_code_2(speaks=os.environ.get("RANK", "0") == "0"):
        config = load_recipe(words)
        from hybrid_megatron.training.loop import train  # after the recipe is read: this imports torch and megatron-core

        try:
            exit_unless_complete(train(config))
        except NoIndexMaps as error:
            raise error.of_recipe(words) from None


def exit_unless_complete(outcome) -> None:
    """A run stopped by a signal exits as a shell expects of one: 130 after SIGINT, 143 after SIGTERM."""
    if not outcome.complete:
        raise SystemExit(128 + signal.Signals[outcome.stopped_by])


if __name__ == "__main__":
    main(sys.argv[1:])
