"""Config + parallel state -> everything a training loop holds."""

from dataclasses import dataclass

from hybrid_megatron.config.megatron import ddp_config
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.data import BatchStream, Dataset
from hybrid_megatron.model.hybrid_model import build_model
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.parallel import ParallelState
from hybrid_megatron.training.optimizer import build_optimizer
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer


@dataclass(frozen=True)
class Trainer:
    config: RunConfig
    state: ParallelState
    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    train_stream: BatchStream
    valid_stream: BatchStream | None


def build_trainer(config: RunConfig, state: ParallelState, train_data: Dataset, valid_data: Dataset | None) -> Trainer:
    """The model with its first parameters, wrapped for gradient reduction, its optimizer, and the streams of batches."""
    model = build_model(config, plan_layers(config), state)
    wrapped = DistributedDataParallel(model.config, ddp_config(), model)
    optimizer = build_optimizer(config, wrapped)
    # Asked for by the pipeline schedule through the model's config.
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.no_sync_func = wrapped.no_sync

    def stream(data: Dataset | None) -> BatchStream | None:
        if data is None:
            return None
        return BatchStream(data, state, batch_samples=config.batch_samples, micro_batch=config.train.micro_batch, seed=config.seed)

    return Trainer(config, state, wrapped, optimizer, stream(train_data), stream(valid_data))
