"""Rules of learning rate and batch over the tokens of a run."""

from collections.abc import Iterator

from hybrid_megatron.config.schema import RunConfig

SHAPES = ("cosine", "linear", "constant", "wsd")


def schedule_problems(config: RunConfig) -> Iterator[str]:
    """Broken rules that hold under every layout; the single values are known to be possible."""
    schedule, tokens = config.schedule, config.train.tokens
    if schedule.warmup_tokens >= tokens:
        yield (
            f"schedule.warmup_tokens={schedule.warmup_tokens}: it must be less than train.tokens={tokens}; "
            "lower the first or raise the second"
        )
    if schedule.min_lr > config.optimizer.peak_lr:
        yield f"schedule.min_lr={schedule.min_lr}: it must not be above optimizer.peak_lr={config.optimizer.peak_lr}"
    if schedule.shape == "constant" and schedule.min_lr:
        yield f"schedule.min_lr={schedule.min_lr}: schedule.shape=constant never falls to it; set it to 0 or use another shape"
    yield from _decay(config)
    if schedule.start_batch_tokens is not None and not schedule.batch_warmup_tokens:
        yield (
            f"schedule.start_batch_tokens={schedule.start_batch_tokens}: it needs batch_warmup_tokens, over which the batch grows; "
            "set both or neither"
        )
    if schedule.start_batch_tokens is None and schedule.batch_warmup_tokens:
        yield (
            f"schedule.batch_warmup_tokens={schedule.batch_warmup_tokens}: it needs start_batch_tokens, from which the batch grows; "
            "set both or neither"
        )
    if schedule.batch_warmup_tokens >= tokens:
        yield (
            f"schedule.batch_warmup_tokens={schedule.batch_warmup_tokens}: it must be less than train.tokens={tokens}; "
            "lower the first or raise the second"
        )


def _decay(config: RunConfig) -> Iterator[str]:
    schedule, left = config.schedule, config.train.tokens - config.schedule.warmup_tokens
    if schedule.shape == "wsd" and schedule.decay_tokens is None:
        yield "schedule.shape=wsd: it needs schedule.decay_tokens, the tokens of its last, falling part"
    elif schedule.shape != "wsd" and schedule.decay_tokens is not None:
        yield (
            f"schedule.decay_tokens={schedule.decay_tokens}: schedule.shape={schedule.shape} has no such part; leave it out or set "
            "schedule.shape=wsd"
        )
    elif schedule.shape == "wsd" and 0 < left < schedule.decay_tokens:
        yield (
            f"schedule.decay_tokens={schedule.decay_tokens}: schedule.warmup_tokens={schedule.warmup_tokens} leaves {left} of "
            f"train.tokens={config.train.tokens}; use at most that"
        )


def batch_problems(config: RunConfig, data: int) -> Iterator[str]:
    """The first rule that the batch breaks on `data` data-parallel ranks, if there is one."""
    parallel, train = config.parallel, config.train
    if train.batch_tokens % train.context:
        lower = train.batch_tokens // train.context * train.context
        nearest = f"{lower} or {lower + train.context}" if lower else f"{train.context}"
        yield f"train.batch_tokens={train.batch_tokens}: it must be a multiple of train.context={train.context}, such as {nearest}"
        return
    if config.batch_samples % (train.micro_batch * data):
        yield (
            f"train.batch_tokens={train.batch_tokens}: it holds {config.batch_samples} samples of {train.context}, which must be a "
            f"multiple of train.micro_batch * data-parallel ranks = {train.micro_batch} * {data}; use another train.micro_batch or batch"
        )
        return
    micro_batches = config.batch_samples // (train.micro_batch * data)
    if parallel.virtual_pipeline > 1 and micro_batches % parallel.pipeline:
        yield (
            f"parallel.virtual_pipeline={parallel.virtual_pipeline}: a step has {micro_batches} micro-batches on each data-parallel rank, "
            f"which must be a multiple of parallel.pipeline={parallel.pipeline}; make train.batch_tokens={train.batch_tokens} a multiple "
            f"of {train.context * train.micro_batch * data * parallel.pipeline}, lower train.micro_batch={train.micro_batch}, "
            "or leave out virtual_pipeline"
        )
        return
    yield from _start_batch(config, data)


def _start_batch(config: RunConfig, data: int) -> Iterator[str]:
    """Every size of a growing batch is a multiple of the first, so what fits that fits all."""
    parallel, train, start = config.parallel, config.train, config.schedule.start_batch_tokens
    factors = {"train.context": train.context, "train.micro_batch": train.micro_batch, "data-parallel ranks": data}
    if parallel.virtual_pipeline > 1:  # the interleaved schedule takes as many micro-batches at a time as there are stages
        factors["parallel.pipeline"] = parallel.pipeline
    unit = train.context * train.micro_batch * data * factors.get("parallel.pipeline", 1)
    parts = train.batch_tokens // unit
    possible = [unit * size for size in range(1, parts) if parts % size == 0]
    if start is None or start in possible:
        return
    yield (
        f"schedule.start_batch_tokens={start}: the batch grows in steps of it, so it must be less than train.batch_tokens="
        f"{train.batch_tokens}, divide it, and be a multiple of {' * '.join(factors)} = {' * '.join(map(str, factors.values()))}; "
        + (f"use one of {', '.join(map(str, possible))}" if possible else "none is; lower train.micro_batch or the data-parallel ranks")
    )
