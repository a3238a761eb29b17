"""AdamW by its definition, who is decayed, clipping, and that every parameter's state is its own."""

import math
import weakref
from types import SimpleNamespace

import pytest
import torch

from hybrid_megatron.config import load_recipe
from hybrid_megatron.data import open_dataset
from hybrid_megatron.parallel import start
from hybrid_megatron.training.adamw import FusedAdamW
from hybrid_megatron.training.build import build_trainer
from hybrid_megatron.training.loop import train_step
from hybrid_megatron.training.optimizer import clip_next_step, set_hyperparameters
from hybrid_megatron.training.stability import Stability
from hybrid_megatron.training.step import forward_backward, squared_gradient_norm
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from tests.cpu import cells
from tests.cpu.tiny import tiny_words
from tests.definitions import relative_error


def test_fused_adamw_is_adamw():
    """Against Loshchilov and Hutter's algorithm 2 in float64, with rates that change from step to step."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (7,), (1, 1)]
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    parameters = [torch.nn.Parameter(v.float()) for v in values]
    optimizer = FusedAdamW(
        [{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.0}], lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    first, second = ([torch.zeros_like(v) for v in values] for _ in range(2))
    for step in range(1, 8):
        lr = 1e-2 / step
        gradients = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        for i, g in enumerate(gradients):
            parameters[i].grad = g.float()
            decay = 0.1 if i == 0 else 0.0
            first[i] = 0.9 * first[i] + 0.1 * g
            second[i] = 0.95 * second[i] + 0.05 * g * g
            direction = first[i] / (1 - 0.9**step) / ((second[i] / (1 - 0.95**step)).sqrt() + 1e-8)
            values[i] = values[i] - lr * decay * values[i] - lr * direction
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    for parameter, value in zip(parameters, values):
        assert torch.allclose(parameter.double(), value, rtol=0, atol=2e-6)


def groups(words: list[str]) -> list[tuple[str, int, float]]:
    """(name, dimensions, weight decay) of every parameter, from the groups of the optimizer as the loop sets them."""
    config = load_recipe(words)
    data = open_dataset(config, "train")
    with start(config.parallel, config.seed) as state:
        trainer = build_trainer(config, state, data, None)
        set_hyperparameters(trainer.optimizer, 1e-3, config.optimizer.weight_decay)
        [part] = trainer.optimizer.chained_optimizers
        found = []
        for name, parameter in trainer.model[0].module.named_parameters():
            group, place = part.model_param_group_index_map[parameter]
            held = part.optimizer.param_groups[group]
            assert torch.equal(held["params"][place].flatten(), parameter.detach().float().flatten()), f"{name} has another's place"
            assert held["lr"] == 1e-3
            found.append((name, parameter.dim(), held["weight_decay"]))
        assert len(found) == sum(len(group["params"]) for group in part.optimizer.param_groups)
        return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_matrices_decay_and_vectors_do_not(ranks, tiny_data, precision):
    [found] = ranks.run(1, groups, tiny_words(tiny_data, "run_dir=unused", f"train.precision={precision}"))
    decays = {name: decay for name, _, decay in found}
    for name, dimensions, decay in found:
        assert decay == (0.1 if dimensions > 1 else 0.0), name
    for ending in ("layernorm.weight", "A_log", "dt_bias", "out_norm"):
        assert any(name.endswith(ending) for name in decays), ending
    for ending in ("in_proj.weight", "out_proj.weight", "linear_fc1.weight", "word_embeddings.weight", "output_layer.weight"):
        assert any(name.endswith(ending) for name in decays), ending


def test_gradients_of_weights_are_not_rounded_on_their_way(ranks, tiny_data):
    """In bf16 the product adds them to float32 buffers; through a gradient in bf16 they would be numbers of that type."""
    words = tiny_words(tiny_data, "run_dir=unused", "train.precision=bf16", "train.micro_batch=8", "train.batch_tokens=512")
    [(_, _, gradients)] = ranks.run(1, cells.loss_and_gradients, words)
    for ending in ("out_proj.weight", "linear_fc1.weight", "linear_fc2.weight", "word_embeddings.weight", "output_layer.weight"):
        found = [torch.from_numpy(gradient) for name, _, _, gradient in gradients if name.endswith(ending)]
        assert found and all((gradient != gradient.bfloat16().float()).any() for gradient in found), ending


def one_step(words: list[str], clip: float) -> tuple[float, float, int]:
    """(gradient norm as logged, norm of the gradients the update used, elements that changed)."""
    config = load_recipe([*words, f"optimizer.clip_grad={clip}"])
    data = open_dataset(config, "train")
    with start(config.parallel, config.seed) as state:
        trainer = build_trainer(config, state, data, None)
        set_hyperparameters(trainer.optimizer, 1e-3, 0.0)
        result = train_step(config, trainer.model, trainer.optimizer, trainer.train_stream, 0, state, Stability(config).judge)
        [part] = trainer.optimizer.chained_optimizers
        moments = [s["exp_avg"] for s in part.optimizer.state.values()]
        return result.grad_norm, math.sqrt(sum(float(m.double().square().sum()) for m in moments)) / 0.1, len(moments)


def most_micro_batches_alive(words: list[str]) -> tuple[int, int]:
    """(used ones whose tokens are still in memory when the next is asked for, at most; how many there are)."""
    config = load_recipe(words)
    data, used, most = open_dataset(config, "train"), [], 0

    def watched(batches):
        nonlocal most
        for batch in batches:
            most = max(most, sum(tokens() is not None for tokens in used))
            used.append(weakref.ref(batch.tokens))
            yield batch
            del batch

    with start(config.parallel, config.seed) as state:
        trainer = build_trainer(config, state, data, None)
        count = trainer.train_stream.micro_batches(0)
        forward_backward(config, trainer.model, watched(trainer.train_stream.step(0)), count, state)
    return most, len(used)


def test_used_micro_batches_are_let_go(ranks, tiny_data):
    words = tiny_words(tiny_data, "run_dir=unused", "train.micro_batch=1", "train.batch_tokens=1024")
    [(most, count)] = ranks.run(1, most_micro_batches_alive, words)
    assert count == 16 and most <= 2


def test_clipping(ranks, tiny_data):
    """The first moment after one step is a tenth of the gradient that was used."""
    words = tiny_words(tiny_data, "run_dir=unused")
    [(norm, used, _)] = ranks.run(1, one_step, words, 1e6)
    assert 0.1 < norm < 1e6 and used == pytest.approx(norm, rel=1e-5), "a small gradient stays as it is"
    [(same, used, _)] = ranks.run(1, one_step, words, norm / 3)
    assert same == norm, "logged before clipping"
    assert used == pytest.approx(norm / 3, rel=1e-4)


def steps(words: list[str], clip: float, separately: bool) -> tuple[list[float], list[torch.Tensor]]:
    """(gradient norms, the optimizer's parameters) after three steps, clipped in the optimizer's kernel, or before it by megatron-core."""
    config = load_recipe([*words, f"optimizer.clip_grad={clip}"])
    data = open_dataset(config, "train")

    def clip_before(optimizer, max_norm: float, norm: float) -> None:
        clip_grad_by_total_norm_fp32(optimizer.get_parameters(), max_norm, norm)

    with start(config.parallel, config.seed) as state, pytest.MonkeyPatch.context() as patched:
        if separately:
            patched.setattr("hybrid_megatron.training.step.clip_next_step", clip_before)
        trainer = build_trainer(config, state, data, None)
        set_hyperparameters(trainer.optimizer, 1e-3, 0.1)
        judge = Stability(config).judge
        norms = [
            train_step(config, trainer.model, trainer.optimizer, trainer.train_stream, step, state, judge).grad_norm for step in range(3)
        ]
        return norms, [parameter.detach().clone() for parameter in trainer.optimizer.get_parameters()]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("active", [True, False])
def test_clipping_is_that_of_megatron_core(ranks, tiny_data, active, precision):
    """Its division is a rounding away from megatron-core's multiplication, 2^-24 of a gradient, where it clips; else all is equal.

    The epsilon is that of a gradient's size, or AdamW would make much of a rounding where a gradient all but cancels.
    """
    words = tiny_words(tiny_data, "run_dir=unused", f"train.precision={precision}", "optimizer.eps=1e-4")
    clip = 0.05 if active else 1e6
    [(norms, found)], [(expected_norms, expected)] = (ranks.run(1, steps, words, clip, separately) for separately in (False, True))
    assert all((norm > clip) == active for norm in norms)
    assert norms == pytest.approx(expected_norms, rel=1e-6 if active else 0)
    for mine, theirs in zip(found, expected, strict=True):
        assert relative_error(mine, theirs) <= (1e-7 if active else 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_step_is_clipped_and_the_next_is_not(dtype):
    """Over several optimizers, one of them of a rank without parameters; the first moment of the first step is a tenth of its gradient."""
    parts = [FusedAdamW([torch.nn.Parameter(torch.ones(9, dtype=dtype))], 1e-2, (0.9, 0.95), 1e-8, 0.0) for _ in range(2)]
    chain = [SimpleNamespace(optimizer=part, is_stub_optimizer=False) for part in parts]
    chain.append(SimpleNamespace(optimizer=None, is_stub_optimizer=True))
    for expected, norm in (((1 - 0.9) * 2, 12.0), (0.9 * 0.2 + 0.1 * 8, 2.0), (0.9 * 0.98, 1e300)):
        clip_next_step(SimpleNamespace(chained_optimizers=chain), 3.0, norm)
        for part in parts:
            [parameter] = part.param_groups[0]["params"]
            parameter.grad = torch.full_like(parameter, 8)
            part.step()
            assert part.state[parameter]["exp_avg"].tolist() == pytest.approx([expected] * 9, rel=1e-2 if dtype is torch.bfloat16 else 1e-6)


def gradient_norm_of(parts: list[torch.Tensor]) -> float:
    """The global norm of gradients on one process."""
    config = load_recipe(["776m+rope+pretrain_4k", "data.train=unused"])
    with start(config.parallel, seed=0) as state:
        part = SimpleNamespace(get_grads_for_grad_norm=lambda: parts)
        squared = squared_gradient_norm(SimpleNamespace(chained_optimizers=[part], get_grad_stats_parallel_group=lambda: state.groups.mp))
        return squared.sqrt().item()


def test_gradient_norm_does_not_depend_on_how_a_matrix_is_cut(ranks):
    """torch.norm in float32 is off by 1e-5 here on a CPU."""
    gradient = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 1e-3
    exact = gradient.double().square().sum().sqrt().item()
    for parts in ([gradient], list(gradient.chunk(2)), list(gradient.chunk(7))):
        [norm] = ranks.run(1, gradient_norm_of, parts)
        assert abs(norm - exact) <= 1e-12 * exact
