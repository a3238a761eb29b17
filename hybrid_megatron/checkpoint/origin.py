"""What a fresh run starts from, `init_from`: whether that checkpoint's parameters are those of the recipe's model."""

import contextlib
from pathlib import Path

from hybrid_megatron.checkpoint.load import check_shapes, shapes_in
from hybrid_megatron.checkpoint.store import CheckpointStore, checkpoint_at, read_progress
from hybrid_megatron.config.load import load_recipe
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.errors import CheckpointError, UserError
from hybrid_megatron.model.parameter_shapes import parameter_shapes
from hybrid_megatron.model.pattern import plan_layers


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
    try:
        check_shapes(f"{checkpoint}: it", parameter_shapes(config), shapes_in(checkpoint), "change the model or give another checkpoint")
    except CheckpointError as error:
        raise CheckpointError(f"{error}{told_apart(config)}") from None
    return checkpoint


def told_apart(config: RunConfig) -> str:
    """'; its layers are ..., those of this model ...' where the run that `init_from` comes from has another pattern; empty if not, or if
    its recipe cannot be read."""
    with contextlib.suppress(UserError):
        before = load_recipe([str(checkpoint_at(Path(config.init_from)).parents[1] / "config.yaml")])
        theirs, ours = (str(plan_layers(each)) for each in (before, config))
        if theirs != ours:
            return f"; its layers are {theirs}, those of this model {ours}"
    return ""


def check_follows(config: RunConfig, before: RunConfig) -> None:
    """Raise CheckpointError unless `config` can start from what `before` will leave, a run that may not have begun."""
    what = f"{config.init_from}: the stage before"
    check_shapes(what, parameter_shapes(config), parameter_shapes(before), "give both stages the same model")
