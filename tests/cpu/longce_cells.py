"""What runs inside the ranks of the tests of LongCE."""

import torch

from hybrid_megatron.config import load_recipe
from hybrid_megatron.data import BatchStream, open_dataset
from hybrid_megatron.model.hybrid_model import build_chunks
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.parallel import start
from hybrid_megatron.training.build import build_trainer
from hybrid_megatron.training.longce import short_losses
from hybrid_megatron.training.step import validation_loss


def short_losses_of(words: list[str]) -> tuple[int, torch.Tensor, torch.Tensor] | None:
    """On the last stage: (data rank, positions of the local tokens, short losses of all its samples of step 0 [samples, s])."""
    config = load_recipe(words)
    data = open_dataset(config, "train")
    with start(config.parallel, config.seed) as state:
        chunks = build_chunks(config, plan_layers(config), state)
        stream = BatchStream(data, state, plan=config.batch_plan, micro_batch=config.train.micro_batch, seed=config.seed)
        batches = list(stream.step(0))
        with torch.no_grad():
            found = torch.cat(short_losses(config, chunks, batches, state))
        return (state.data_rank, batches[0].layout.positions("cpu"), found) if state.is_last_stage else None


def validation_of(words: list[str]) -> float:
    """The validation loss of an untrained model."""
    config = load_recipe(words)
    train_data, valid_data = (open_dataset(config, split) for split in ("train", "valid"))
    with start(config.parallel, config.seed) as state:
        trainer = build_trainer(config, state, train_data, valid_data)
        return validation_loss(config, trainer.model, trainer.valid_stream, state)
