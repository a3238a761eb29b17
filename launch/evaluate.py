"""python -m launch evaluate RUN_DIR [--json] [section.key=value ...]

Measures how well the newest checkpoint of a run predicts held-out tokens: loss by position and perplexity at 1 to 16 times the training
length. Settings of inference (inference.logit_scale=log, inference.swla_window=4096, ...) need no other checkpoint. Results go to
RUN_DIR/evaluation/CHECKPOINT/NAME.json and NAME.png; --json prints the first instead of a table. On N devices: torchrun --nproc-per-node N
-m launch evaluate ... parallel.context=N. Every setting, its unit and meaning: EvaluationConfig in hybrid_megatron/config/schema.py.
"""

import os
import sys
from pathlib import Path

from hybrid_megatron.config import EvaluationConfig, load_settings
from hybrid_megatron.errors import ConfigError, exit_with_code_2
from launch.words import help_if_asked


def main(words: list[str]) -> None:
    help_if_asked(__doc__, words)
    speaks = os.environ.get("RANK", "0") == "0"
    with exit_with_code_2(speaks=speaks):
        as_numbers = "--json" in words
        words = [word for word in words if word != "--json"]
        if not words or "=" in words[0] or words[0].startswith("-"):
            raise ConfigError("no run folder given: name it first, e.g. python -m launch evaluate runs/NAME inference.logit_scale=log")
        settings = load_settings(EvaluationConfig, words[1:])
        from hybrid_megatron.evaluation.evaluate import evaluate  # after the settings are read: this imports torch and megatron-core
        from hybrid_megatron.evaluation.results import as_json

        report = evaluate(Path(words[0]), settings, silent=as_numbers)
        if as_numbers and speaks:
            print(as_json(report))


if __name__ == "__main__":
    main(sys.argv[1:])
