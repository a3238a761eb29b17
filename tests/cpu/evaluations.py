"""Evaluations as tests see them: the command inside a living rank, and the sums it is made of."""

import contextlib
import io
import warnings
from pathlib import Path
from unittest.mock import patch

from torch import Tensor

from hybrid_megatron.config import EvaluationConfig, load_settings
from hybrid_megatron.evaluation import evaluate as evaluate_module
from hybrid_megatron.evaluation import results
from launch import choose_logit_base
from launch import evaluate as evaluate_command
from tests.cpu.ranks import Ranks
from tests.cpu.runs import Ended


def _inside(module, words: list[str]) -> Ended:
    """A command of `launch`, inside a rank."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        try:
            module.main(words)
        except SystemExit as end:
            code = end.code
    return Ended(code, out.getvalue(), err.getvalue())


def command(words: list[str]) -> Ended:
    """`python -m launch evaluate WORDS`, inside a rank."""
    return _inside(evaluate_command, words)


def choose_command(words: list[str]) -> Ended:
    """`python -m launch choose-logit-base WORDS`, inside a rank."""
    return _inside(choose_logit_base, words)


def evaluate(ranks: Ranks, size: int, words: list[str]) -> Ended:
    """`command` on `size` ranks; they end alike, and rank 0 alone speaks."""
    ended = ranks.run(size, command, words)
    assert len({each.code for each in ended}) == 1, ended
    assert not any(each.out or each.err for each in ended[1:]), ended
    return ended[0]


def sums_by_position(run: Path, words: list[str]) -> dict[int, tuple[Tensor, Tensor]]:
    """Length to the sums of nats and the tokens at each position, as one rank knows them after an evaluation."""
    found = {}

    def measure(model, data, length, micro_batch, state):
        result = plain(model, data, length, micro_batch, state)
        found[length] = result.sums, result.tokens
        return result

    plain = evaluate_module.measure
    with patch.object(evaluate_module, "measure", measure):
        evaluate_module.evaluate(run, load_settings(EvaluationConfig, words), silent=True)
    return found


def drawn_over(words: list[str]) -> list[dict]:
    """The other evaluations that the picture of this one is drawn over."""
    drawn = []
    plain = results.draw
    with patch.object(results, "draw", lambda evaluation, others, file: (drawn.extend(others), plain(evaluation, others, file))):
        assert command(words).code == 0
    return drawn
