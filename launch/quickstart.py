"""python -m launch quickstart [section.key=value ...]

Fetches a small real corpus, trains a tokenizer on it, makes the datasets, trains recipes/quickstart.yaml on them and says how it went.
Every step is skipped if it is already done; an interrupted run resumes.
"""

import sys
import time
from pathlib import Path

from data_prep.cli import main as data_prep
from hybrid_megatron.config import load_recipe
from hybrid_megatron.errors import exit_with_code_2
from hybrid_megatron.training.signals import stop_on_signals
from launch.train import exit_unless_complete
from launch.words import help_if_asked

DATA = Path("data/quickstart")
RECIPE = "recipes/quickstart.yaml"


def main(words: list[str]) -> None:
    help_if_asked(__doc__, words, needs_words=False)
    began = time.monotonic()
    with exit_with_code_2():
        config = load_recipe([RECIPE, *words])
        _prepare_data(words)
        from hybrid_megatron.evaluation.unigram import unigram_cross_entropy  # after the data: this imports torch and megatron-core
        from hybrid_megatron.training.loop import train
        from hybrid_megatron.training.plot import plot_losses

        with stop_on_signals() as stop:
            outcome = train(config, stop)
        exit_unless_complete(outcome)
        unigram = unigram_cross_entropy(config)
        plot = plot_losses(outcome.run_dir, baseline=("unigram model of the training set", unigram))
    print(f"baseline   {unigram:.4f} nats: cross entropy of the training set's unigram model on the same held-out samples, in {plot}")
    print(f"took       {time.monotonic() - began:.0f} s in all, this time")


def _prepare_data(words: list[str]) -> None:
    corpus, tokenizer = DATA / "sample.jsonl", DATA / "tokenizer.model"
    source = ["--source", "jsonl", "--input", str(corpus)]
    for command in (
        ["fetch-sample", "--output", str(DATA)],
        ["train-tokenizer", *source, "--vocab-size", "4096", "--output", str(tokenizer)],
        ["tokenize", *source, "--tokenizer", str(tokenizer), "--output", str(DATA)],
        ["split", "--input", str(DATA / "documents"), "--output", str(DATA), "--valid-fraction", "0.05"],
        ["build-cache", RECIPE, *words],
    ):
        code = data_prep(command)
        if code:
            raise SystemExit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
