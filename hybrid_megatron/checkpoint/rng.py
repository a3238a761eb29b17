"""Random state of every rank, kept for a bitwise resume under the same layout; another layout has no use for it."""

import random

import numpy as np
import torch

from hybrid_megatron import platform
from hybrid_megatron.parallel import ParallelState
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject


def sharded_rng(state: ParallelState) -> ShardedObject:
    """This rank's states as one object of the checkpoint, addressed by (pipeline, tensor, data x context) rank."""
    groups = (state.groups.pp, state.groups.tp, state.groups.dp_cp)
    return ShardedObject("rng", _states(), tuple(g.size() for g in groups), tuple(g.rank() for g in groups), replica_id=0)


def _states() -> dict:
    _, keys, *rest = np.random.get_state()  # the keys as a tensor: a checkpoint holds no pickled arrays
    return {
        "python": random.getstate(),
        "numpy": (torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if platform.is_cuda() else None,
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def restore_rng(states: dict) -> None:
    random.setstate(states["python"])
    keys, *rest = states["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and platform.is_cuda():
        torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
