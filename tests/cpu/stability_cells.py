"""What runs inside the ranks of stability tests: trainings with batches that went wrong, and one that leaves steps out by hand."""

import dataclasses
import unittest.mock

from hybrid_megatron import platform
from hybrid_megatron.config import load_recipe
from hybrid_megatron.data import BatchStream, open_dataset
from hybrid_megatron.parallel import start
from hybrid_megatron.training import step as step_module
from hybrid_megatron.training.build import build_trainer
from hybrid_megatron.training.optimizer import set_hyperparameters
from hybrid_megatron.training.schedule import learning_rate
from hybrid_megatron.training.stability import Decision
from hybrid_megatron.training.step import train_step
from tests.cpu.ranks import Ranks
from tests.cpu.runs import Ended, command


def train_disturbed(ranks: Ranks, size: int, words: list[str], factors: dict[int, float], norms: dict[int, float] = {}, **how) -> Ended:  # noqa: B006
    """The train command, where the loss of step n (1-based) and its gradients are factors[n] times what they are, and only its gradient
    norm norms[n] times; a factor may be infinite. The ranks end alike, and rank 0 alone speaks."""
    ended = ranks.run(size, _disturbed, words, factors, norms, how)
    assert len({each.code for each in ended}) == 1, ended
    assert not any(each.out or each.err for each in ended[1:]), ended
    return ended[0]


def _disturbed(words: list[str], factors: dict[int, float], norms: dict[int, float], how: dict) -> Ended:
    plain_step, plain_norm = BatchStream.step, step_module.squared_gradient_norm
    now = 0

    def step(stream, number):
        nonlocal now
        now = number + 1
        for batch in plain_step(stream, number):
            yield dataclasses.replace(batch, weights=batch.weights * factors.get(now, 1.0))

    def squared_gradient_norm(optimizer):
        return plain_norm(optimizer) * norms.get(now, 1.0) ** 2

    with (
        unittest.mock.patch.object(BatchStream, "step", step),
        unittest.mock.patch.object(step_module, "squared_gradient_norm", squared_gradient_norm),
    ):
        return command(words, **how)


def without_steps(words: list[str], left_out: list[int]) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of a training whose loop, apart from the product's, passes over the steps `left_out`."""
    config = load_recipe(words)
    platform.select_device()
    rows = []
    with start(config.parallel, config.seed) as state:
        trainer = build_trainer(config, state, open_dataset(config, "train"), None)
        for step in range(config.num_steps):
            if step + 1 in left_out:
                continue
            set_hyperparameters(trainer.optimizer, learning_rate(config, step), config.optimizer.weight_decay)
            result = train_step(
                config, trainer.model, trainer.optimizer, trainer.train_stream, step, state, lambda *_: Decision(update=True)
            )
            rows.append((step + 1, result.losses.loss, result.grad_norm))
    return rows


def judged_on_uneven_ranks(words: list[str]) -> tuple[float, float]:
    """(loss, gradient norm) as this rank judges them in the first step, when the sums of every rank are rounded in a way of their own."""
    config = load_recipe(words)
    plain, seen = step_module._reported, []

    with start(config.parallel, config.seed) as state:

        def reported(*given):
            total, tokens, report = plain(*given)
            return total, tokens, {"sums": report["sums"] * (1 + state.rank * 2.0**-50)}

        def judge(loss, grad_norm) -> Decision:
            seen.append((loss, grad_norm))
            return Decision(update=False)

        trainer = build_trainer(config, state, open_dataset(config, "train"), None)
        with unittest.mock.patch.object(step_module, "_reported", reported):
            train_step(config, trainer.model, trainer.optimizer, trainer.train_stream, 0, state, judge)
    return seen[0]
