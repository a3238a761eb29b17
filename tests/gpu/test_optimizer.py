"""The update on CUDA writes float32 masters and the bfloat16 parameters that the model multiplies by, in one kernel."""

import torch

from hybrid_megatron.config import load_recipe
from hybrid_megatron.data import open_dataset
from hybrid_megatron.parallel import start
from hybrid_megatron.training.build import build_trainer
from hybrid_megatron.training.optimizer import set_hyperparameters
from hybrid_megatron.training.stability import Stability
from hybrid_megatron.training.step import train_step
from tests.cpu.tiny import make_tiny_data, tiny_words


def test_parameters_are_their_masters_rounded(tmp_path):
    config = load_recipe(tiny_words(make_tiny_data(tmp_path), "run_dir=unused", "model.head_dim=64", "train.precision=bf16"))
    with start(config.parallel, config.seed) as state:
        trainer = build_trainer(config, state, open_dataset(config, "train"), None)
        [part] = trainer.optimizer.chained_optimizers
        pairs = [
            pair
            for groups in (
                (part.model_float16_groups, part.shard_fp32_from_float16_groups),
                (part.model_fp32_groups, part.shard_fp32_groups),
            )
            for group in zip(*groups, strict=True)
            for pair in zip(*group, strict=True)
        ]
        assert len(pairs) == len(list(trainer.model[0].parameters()))
        judge = Stability(config).judge
        for step in range(2):
            before = [parameter.detach().clone() for parameter, _ in pairs]
            set_hyperparameters(trainer.optimizer, 1e-2, config.optimizer.weight_decay)
            train_step(config, trainer.model, trainer.optimizer, trainer.train_stream, step, state, judge)
            for (parameter, master), old in zip(pairs, before):
                assert torch.equal(parameter.flatten(), master.to(parameter.dtype).flatten())
                assert not torch.equal(parameter, old)
        assert {parameter.dtype for parameter, _ in pairs} == {torch.bfloat16, torch.float32}
