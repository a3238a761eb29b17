"""Config + parallel state -> everything a training loop holds."""

from dataclasses import dataclass
from pathlib import Path

from hybrid_megatron.checkpoint.load import load_weights
from hybrid_megatron.checkpoint.store import Progress
from hybrid_megatron.config.megatron import ddp_config
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.data import BatchStream, Dataset
from hybrid_megatron.model.hybrid_model import HybridModel, build_chunks
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.parallel import ParallelState
from hybrid_megatron.training.buckets import bucketed_layout
from hybrid_megatron.training.optimizer import build_optimizer
from hybrid_megatron.training.weight_gradients import add_weight_gradients_by_matmul
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer


@dataclass(frozen=True)
class Trainer:
    config: RunConfig
    state: ParallelState
    model: list[DistributedDataParallel]
    """The chunks of this rank."""
    optimizer: MegatronOptimizer
    train_stream: BatchStream
    valid_stream: BatchStream | None
    origin: Progress | None = None
    """How far the run was whose parameters this one starts from, if there is one."""


def build_trainer(
    config: RunConfig, state: ParallelState, train_data: Dataset, valid_data: Dataset | None, init_from: Path | None = None
) -> Trainer:
    """The model with its first parameters, wrapped for gradient reduction, its optimizer, and the streams of batches.

    The first parameters are drawn from the seed, or are those of the checkpoint `init_from`; raises CheckpointError if they do not fit.
    """
    chunks = build_chunks(config, plan_layers(config), state)
    origin = None if init_from is None else load_weights(init_from, chunks, state)  # before the optimizer copies them to its masters
    model = reduced(chunks, ddp_config(state.groups.dp_cp.size()), state)
    optimizer = build_optimizer(config, model)

    def stream(data: Dataset | None) -> BatchStream | None:
        if data is None:
            return None
        return BatchStream(data, state, plan=config.batch_plan, micro_batch=config.train.micro_batch, seed=config.seed)

    return Trainer(config, state, model, optimizer, stream(train_data), stream(valid_data), origin)


def reduced(chunks: list[HybridModel], ddp: DistributedDataParallelConfig, state: ParallelState) -> list[DistributedDataParallel]:
    """The chunks, wrapped so that the pipeline schedule leaves their gradients reduced."""
    config = chunks[0].config  # one for all chunks; the schedule asks it for the functions below
    ranks = state.groups.dp_cp.size()
    layouts = [bucketed_layout(chunk, ranks, ddp) if ddp.use_distributed_optimizer else None for chunk in chunks]
    model = [DistributedDataParallel(config, ddp, chunk, full_param_layout=layout) for chunk, layout in zip(chunks, layouts)]
    add_weight_gradients_by_matmul(model)
    config.finalize_model_grads_func = sum_gradients
    config.no_sync_func = model[0].no_sync if len(model) == 1 else [chunk.no_sync for chunk in model]
    return model


def sum_gradients(model: list[DistributedDataParallel], _tokens, **more) -> None:
    """megatron-core's, over ranks. It would then divide by the number of tokens, a pass over all gradients: the loss is divided already."""
    finalize_model_grads(model, None, **more)
