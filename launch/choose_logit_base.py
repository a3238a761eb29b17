"""python -m launch choose-logit-base RUN_DIR [--json] [candidates=[100,300,900]] [section.key=value ...]

Chooses the base a of HypeNet's logit scale by the loss on held-out tokens at the longest length: one evaluation for each candidate, and
one without a scale. Other settings are those of `python -m launch evaluate`; lengths=[N] sets the length, data=PREFIX the held-out tokens
and whole_documents=true takes long documents alone. The choice goes to RUN_DIR/evaluation/logit_base.CHECKPOINT.json; --json prints it
instead of a table. Every setting: LogitBaseConfig in hybrid_megatron/config/schema.py.
"""

import os
import sys
from pathlib import Path

from hybrid_megatron.config import load_settings
from hybrid_megatron.config.schema import LogitBaseConfig
from hybrid_megatron.errors import ConfigError, exit_with_code_2
from launch.words import help_if_asked


def main(words: list[str]) -> None:
    help_if_asked(__doc__, words)
    speaks = os.environ.get("RANK", "0") == "0"
    with exit_with_code_2(speaks=speaks):
        as_numbers = "--json" in words
        words = [word for word in words if word != "--json"]
        if not words or "=" in words[0] or words[0].startswith("-"):
            raise ConfigError(
                "no run folder given: name it first, e.g. python -m launch choose-logit-base runs/NAME candidates=[100,300,900]"
            )
        settings = load_settings(LogitBaseConfig, words[1:])
        from hybrid_megatron.evaluation.logit_base import as_json, choose_logit_base  # this imports torch and megatron-core

        choice = choose_logit_base(Path(words[0]), settings, silent=as_numbers)
        if as_numbers and speaks:
            print(as_json(choice))


if __name__ == "__main__":
    main(sys.argv[1:])
