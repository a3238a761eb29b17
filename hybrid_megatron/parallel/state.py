"""Config -> parallel state: start the process groups, say where this process stands, and take them down again.

megatron-core keeps its groups in module globals; this is the one place that sets them, and everything else receives a ParallelState.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from hybrid_megatron import platform
from hybrid_megatron.config.schema import ParallelConfig
from hybrid_megatron.errors import UserError
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection


_TIMEOUT = timedelta(minutes=30)
"""As megatron-core's own."""


@dataclass(frozen=True)
class ParallelState:
    """Sizes of the layout and this process' place in it."""

    world_size: int
    rank: int
    tensor: int
    context: int
    pipeline: int
    virtual_pipeline: int
    """Model chunks of this rank: its layers are every `pipeline`-th of pipeline * virtual_pipeline equal parts."""
    data: int
    """Data-parallel size: what tensor, context and pipeline leave of the world."""
    data_rank: int
    context_rank: int
    groups: ProcessGroupCollection

    @property
    def is_first_stage(self) -> bool:
        return self.groups.pp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        return self.groups.pp.rank() == self.pipeline - 1

    @property
    def layout(self) -> dict[str, int]:
        """The sizes alone, as stored in checkpoints."""
        names = ("tensor", "context", "pipeline", "virtual_pipeline", "data")
        return {name: getattr(self, name) for name in names}

    @property
    def micro_batch_group(self) -> int:
        """The micro-batches of one pass must be a multiple of this: the interleaved schedule takes as many at a time as there are stages,
        through one chunk after the other."""
        return self.pipeline if self.virtual_pipeline > 1 else 1

    def sum_over_samples(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over data and context ranks of the last stage; all ranks get it, to the bit, and so may decide by it. In place.

        Tensor ranks hold the same values but for rounding; those of the first one count.
        """
        if not self.is_last_stage or self.groups.tp.rank() != 0:
            values.zero_()
        dist.all_reduce(values)
        return values

    def highest(self, mine: list[int]) -> list[int]:
        """The largest of all ranks' values in each place, on every rank; one collective call however many there are."""
        if self.world_size == 1:
            return mine
        values = torch.tensor(mine, device=platform.device())
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values.tolist()

    def of_all_ranks(self, value) -> list:
        """Every rank's value, on every rank; any picklable object."""
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def set_timeout(self, timeout: timedelta) -> None:
        """How long operations that begin from now on may wait for other ranks, in all groups of this process."""
        for group in list(_world.pg_map):
            _set_pg_timeout(timeout, group)

    def from_rank_0(self, value):
        """Rank 0's value, on every rank; any picklable object."""
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A UserError that one rank raises inside is raised on all at the end, so that none waits for a rank that gave up. Collective."""
        mine = None
        try:
            yield
        except UserError as error:
            mine = error
        first = next((error for error in self.of_all_ranks(mine) if error is not None), None)
        if first is not None:
            raise first from None


def world_size() -> int:
    """Number of processes, as torchrun tells it; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def global_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _store(timeout: timedelta) -> dist.Store:
    """Where the ranks find each other: as torchrun says, or, alone, with no port and no address.

    torchrun keeps one store for all its starts, and what the ranks of an earlier one wrote would be taken for the present ones' addresses
    (pytorch issue 135712), so on one node each start has keys of its own. On several, torchrun's agents count restarts each for itself.
    """
    if world_size() == 1:
        return dist.HashStore()
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size()) else "0"
    return dist.PrefixStore(f"start_{restarts}", store)


@contextlib.contextmanager
def start(parallel: ParallelConfig, seed: int, timeout: timedelta = _TIMEOUT) -> Iterator[ParallelState]:
    """Start torch.distributed and megatron-core's groups for this layout; destroy both at the end, whatever happens.

    Operations between ranks, and their coming together, may wait for `timeout`.
    """
    dist.init_process_group(platform.backend(), timeout=timeout, store=_store(timeout), rank=global_rank(), world_size=world_size())
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
            context_parallel_size=parallel.context,
            distributed_timeout_minutes=timeout / timedelta(minutes=1),
        )
        # Nothing in a training step draws random numbers, but megatron-core forks this generator under sequence parallelism.
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        yield ParallelState(
            world_size=dist.get_world_size(),
            rank=dist.get_rank(),
            tensor=parallel.tensor,
            context=parallel.context,
            pipeline=parallel.pipeline,
            virtual_pipeline=parallel.virtual_pipeline,
            data=groups.dp.size(),
            data_rank=groups.dp.rank(),
            context_rank=groups.cp.rank(),
            groups=groups,
        )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
