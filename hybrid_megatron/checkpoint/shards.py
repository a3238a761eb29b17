"""Plan a save: which shards this rank writes into its file, and on rank 0 the metadata of all. Nothing is copied or written here."""

from pathlib import Path

import torch

from hybrid_megatron.parallel import ParallelState
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType


class Share(FileSystemWriterAsync):
    """What one rank writes: one file, of these tensors and objects. On rank 0 `metadata` describes the shards of all ranks."""

    name: str
    objects: list
    """Items of the plan with their bytes, already taken from the state."""
    tensors: list[tuple[WriteItem, torch.Tensor]]
    """Items of the plan with the tensors themselves, which training changes."""
    metadata: Metadata | None

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """In place of megatron-core's, which copies."""
        self.name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        items = [(item, planner.resolve_data(item)) for item in plan.items]
        self.objects = [(item, data) for item, data in items if item.type == WriteItemType.BYTE_IO]
        self.tensors = [(item, data.detach()) for item, data in items if item.type != WriteItemType.BYTE_IO]

    @property
    def finalize_fns(self) -> list:
        """What megatron-core would have called at the end of a save; finishing is saver.py's part."""
        return []


class _PlanOnly(TorchDistSaveShardedStrategy):
    def async_save(self, sharded_state_dict: dict, checkpoint_dir: Path, async_strategy: str = "mcore") -> Share:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        share = Share(checkpoint_dir)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False)
        (_, share.metadata, _), *_ = save_state_dict_async_plan(mcore_to_pyt_state_dict(by_key), share, planner=planner)
        return share


class Planner:
    """Plans the saves of one form in one run. Data ranks share what they hold alike (parameters; all of a permanent one) evenly.

    Who writes what is agreed by the first save, which also checks that every shard is written once; later ones do the same.
    """

    def __init__(self, state: ParallelState):
        self._strategy = FullyParallelSaveStrategyWrapper(_PlanOnly(), state.groups.dp_cp, do_cache_distribution=True)

    def plan(self, content: dict, partial: Path, facts: dict) -> Share:
        """`facts`: plain values put into the checkpoint beside the shards. Collective."""
        return dist_checkpointing.save(
            content,
            str(partial),
            self._strategy,
            validate_access_integrity=False,
            async_sharded_save=True,
            async_strategy="mcore",
            content_metadata=facts,
        )
