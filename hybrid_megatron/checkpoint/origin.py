"""What a fresh run starts from, `init_from`: whether that checkpoint's parameters are those of the recipe's model."""

from pathlib import Path

from hybrid_megatron.checkpoint.load import check_shapes, shapes_in
from hybrid_megatron.checkpoint.store import CheckpointStore, checkpoint_at, read_progress
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.errors import CheckpointError
from hybrid_megatron.model.parameter_shapes import parameter_shapes


def needs_origin(config: RunConfig) -> bool:
    """Whether training would read `init_from`: a run that has a checkpoint of its own goes on from that."""
    return config.init_from is not None and CheckpointStore(config.run_dir).newest() is None


def check_origin(config: RunConfig) -> Path:
    """The checkpoint that `init_from` names. Raises CheckpointError where training would, but for damage that only hashes tell."""
    checkpoint = checkpoint_at(Path(config.init_from))
    try:
        read_progress(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; give another checkpoint") from None
    check_shapes(f"{checkpoint}: it", parameter_shapes(config), shapes_in(checkpoint), "change the model or give another checkpoint")
    return checkpoint


def check_follows(config: RunConfig, before: RunConfig) -> None:
    """Raise CheckpointError unless `config` can start from what `before` will leave, a run that may not have begun."""
    what = f"{config.init_from}: the stage before"
    check_shapes(what, parameter_shapes(config), parameter_shapes(before), "give both stages the same model")
