"""Initial parameters that do not depend on the layout.

Each parameter is drawn whole on the CPU in float32, from a generator seeded by the run's seed and the parameter's global name, and then cut
to this rank's share, which its ShardedTensor describes. So one seed gives the same model under every tensor, pipeline and data size, on a
CPU or a GPU.
"""

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import torch
from torch import Tensor

from hybrid_megatron import platform
from hybrid_megatron.config.megatron import sharding_metadata
from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.parallel import ParallelState
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.transformer.module import MegatronModule


_MOST_AT_ONCE = 8
"""Each in float32, whole."""


@torch.no_grad()
def initialize_parameters(model: MegatronModule, run: RunConfig, state: ParallelState) -> None:
    """Matrices from N(0, model.init_std), vectors as their `init` says, or ones (norms). Every parameter of the model is drawn."""
    drawn = set()
    tensors = model.sharded_state_dict(metadata=sharding_metadata(state.groups.dp_cp))
    special = {p.data_ptr(): p.init for p in model.parameters() if hasattr(p, "init")}
    apply_factories(tensors)  # splits the fused gate and up rows of SwiGLU into their places in the whole matrix
    parameters = [list(shards) for _, shards in groupby(sharded_tensors(tensors), lambda tensor: tensor.key)]
    for shards, whole in _side_by_side(parameters, lambda shards: _draw(shards[0], special.get(shards[0].data.data_ptr()), run)):
        for tensor in shards:
            cut = tuple(slice(offset, offset + length) for offset, length in zip(tensor.global_offset, tensor.local_shape))
            tensor.data.copy_(whole[cut])
            drawn.add(tensor.data.untyped_storage().data_ptr())
    missed = [name for name, p in model.named_parameters() if p.untyped_storage().data_ptr() not in drawn]
    assert not missed, f"parameters without initial values: {missed}"


def _side_by_side(parameters: list, draw) -> Iterator[tuple[list[ShardedTensor], Tensor]]:
    """Each with what is drawn for it, in order; a generator's numbers come one after the other, those of several on a core each."""
    count = min(_MOST_AT_ONCE, platform.cores())
    drawing: deque = deque()
    with ThreadPoolExecutor(count) as pool:
        for shards in parameters:
            drawing.append((shards, pool.submit(draw, shards)))
            if len(drawing) > count:
                shards, drawn = drawing.popleft()
                yield shards, drawn.result()
        for shards, drawn in drawing:
            yield shards, drawn.result()


def _draw(tensor: ShardedTensor, init, run: RunConfig) -> Tensor:
    digest = hashlib.sha256(f"{run.seed}/{tensor.key}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    shape = tuple(tensor.global_shape)
    if init is not None:
        return init(shape, generator)
    if len(shape) == 1:
        return torch.ones(shape)
    return torch.randn(shape, generator=generator).mul_(run.model.init_std)


def sharded_tensors(tree) -> list[ShardedTensor]:
    """All ShardedTensors, those of one key next to each other."""
    if isinstance(tree, ShardedTensor):
        return [tree]
    below = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [tensor for part in below for tensor in sharded_tensors(part)]
