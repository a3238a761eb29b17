"""A recipe on a number of GPUs: sizes of the grid, and the layers of each pipeline stage."""

from dataclasses import dataclass

from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.config.validate import validate
from hybrid_megatron.errors import ConfigError
from hybrid_megatron.model.pattern import Layer, LayerPlan


@dataclass(frozen=True)
class Layout:
    config: RunConfig
    plan: LayerPlan
    gpus: int

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        parallel = self.config.parallel
        return self.gpus // (parallel.tensor * parallel.context * parallel.pipeline)

    @property
    def shards(self) -> int:
        """Ranks that share the optimizer's state: data times context."""
        return self.data * self.config.parallel.context

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step of `train.batch_tokens` on each data-parallel rank."""
        return self.config.batch_samples // (self.config.train.micro_batch * self.data)

    @property
    def local_tokens(self) -> int:
        """Tokens of a micro-batch on one context rank."""
        return self.config.train.micro_batch * self.config.train.context // self.config.parallel.context

    @property
    def residual_share(self) -> int:
        """Ranks over which norms and residuals are split: the tensor ranks under sequence parallelism, else one."""
        return self.config.parallel.tensor if self.config.parallel.sequence else 1

    @property
    def element(self) -> int:
        """Bytes of a parameter or an activation."""
        return {"bf16": 2, "fp32": 4}[self.config.train.precision]

    def chunks(self, stage: int) -> list[tuple[Layer, ...]]:
        """Layers of each model chunk of a pipeline stage; the interleaved schedule gives stage s the parts s, s + pipeline, ..."""
        stages, chunks = self.config.parallel.pipeline, self.config.parallel.virtual_pipeline
        count = len(self.plan.layers) // (stages * chunks)
        return [self.plan.layers[first : first + count] for first in range(stage * count, len(self.plan.layers), stages * count)]


def problems_of(config: RunConfig, gpus: int) -> list[str]:
    """Every rule that the recipe breaks on so many GPUs."""
    try:
        validate(config, gpus)
    except ConfigError as error:
        return error.problems
    return []
