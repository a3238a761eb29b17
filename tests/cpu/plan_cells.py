"""For the tests of plans: recipes and layouts by words, and what runs inside the ranks: what is really in memory, in flight and on its way,
and who is in which group."""

import contextlib
import weakref
from collections.abc import Iterator
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybrid_megatron.config import RunConfig, load_recipe
from hybrid_megatron.data import open_dataset
from hybrid_megatron.model.hybrid_model import build_model
from hybrid_megatron.model.mixer_layer import MixerLayer
from hybrid_megatron.model.pattern import plan_layers
from hybrid_megatron.ops import linear_cross_entropy as loss_module
from hybrid_megatron.ops import swiglu
from hybrid_megatron.parallel import SequenceLayout, start
from hybrid_megatron.planning.layout import Layout
from hybrid_megatron.training.build import build_trainer
from hybrid_megatron.training.stability import Stability
from hybrid_megatron.training.step import train_step
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers, mappings


def recipe(*words: str) -> RunConfig:
    return load_recipe(list(words), beneath={"data": {"train": "unset"}})


def layout(*words: str, gpus: int = 1) -> Layout:
    config = recipe(*words)
    return Layout(config, plan_layers(config), gpus)


def groups(words: list[str]) -> dict[str, list[int]]:
    """This rank's groups, by the names of rank_grid.py."""
    config = load_recipe(words)
    with start(config.parallel, config.seed) as state:
        of = {"tensor": "tp", "context": "cp", "data": "dp", "pipeline": "pp", "data_context": "dp_cp"}
        return {kind: sorted(dist.get_process_group_ranks(getattr(state.groups, name))) for kind, name in of.items()}


def after_a_step(words: list[str]) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer on this rank after one training step; its stage, and passes that were in flight."""
    config = load_recipe(words)
    with start(config.parallel, config.seed) as state, _counted_passes() as passes:
        trainer = build_trainer(config, state, open_dataset(config, "train"), None)
        train_step(config, trainer.model, trainer.optimizer, trainer.train_stream, 0, state, Stability(config).judge)
        parameters = [p for chunk in trainer.model for p in chunk.parameters()]
        kept = 0
        for part in trainer.optimizer.chained_optimizers:
            masters = [p for group in part.shard_fp32_from_float16_groups for p in group if p is not None]
            states = [x for state in part.optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
            kept += sum(x.numel() * x.element_size() for x in [*masters, *states])
        return {
            "stage": state.groups.pp.rank(),
            "weights": sum(p.numel() * p.element_size() for p in parameters),
            "gradients": sum(p.main_grad.numel() * p.main_grad.element_size() for p in parameters),
            "optimizer": kept,
            "in_flight": passes.most,
        }


class Passes:
    """Forward passes whose backward pass is still to come."""

    now = most = 0


@contextlib.contextmanager
def _counted_passes() -> Iterator[Passes]:
    passes = Passes()
    forward, backward = schedules.forward_step, schedules.backward_step

    def counted_forward(*args, **more):
        passes.now += 1
        passes.most = max(passes.most, passes.now)
        return forward(*args, **more)

    def counted_backward(*args, **more):
        passes.now -= 1
        return backward(*args, **more)

    with patch.object(schedules, "forward_step", counted_forward), patch.object(schedules, "backward_step", counted_backward):
        yield passes


class Allocated(TorchDispatchMode):
    """Bytes of tensors made while it is on: now, and at most. A storage counts while anything holds it."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self._add(x.untyped_storage(), before)
        return result

    def _add(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place in before or place in self.known:
            return
        self.known.add(place)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, place, size)

    def _gone(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.now -= size


def layer_without_mixers(words: list[str]) -> tuple[int, int, int]:
    """Of the first layer whose mixers are left out, the input projection's first columns going into the output projection: bytes kept for
    the backward pass, bytes of megatron-core's buffer, and the most bytes in the backward pass beyond those kept."""
    config = load_recipe(words)
    with start(config.parallel, config.seed) as state:
        model = build_model(config, plan_layers(config), state)
        parameters = {p.untyped_storage()._cdata for p in model.parameters()}
        layout = SequenceLayout(config.train.context)
        tokens = config.train.context // (config.parallel.tensor if config.parallel.sequence else 1)
        shape = (tokens, config.train.micro_batch, config.model.hidden_size)
        kept: dict[int, int] = {}

        def keep(x: torch.Tensor) -> torch.Tensor:
            if x.untyped_storage()._cdata not in parameters:
                kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
            return x

        def forward(mixing, hidden, *args, **more):
            projected, _ = mixing.in_proj(hidden)
            return mixing.out_proj(projected[..., : mixing.order.columns // config.parallel.tensor].contiguous())

        # By its kernel, as on CUDA, SwiGLU's backward pass allocates nothing but its result.
        kernel = patch.object(swiglu, "_by_definition", lambda gradient, gate_and_up: torch.zeros_like(gate_and_up))
        with kernel, patch.object(MixerLayer, "forward", forward), Allocated() as allocated:
            hidden = torch.randn(shape, requires_grad=True)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                output, _ = model.decoder.layers[0](hidden, attention_mask=None, packed_seq_params=layout)
            output.backward(torch.ones_like(output))
        buffer = sum(x.untyped_storage().nbytes() for x in parallel_state.get_global_memory_buffer().buffer.values())
        return sum(kept.values()), buffer, allocated.most - sum(kept.values())


def loss(words: list[str], tokens: int, chunk_elements: int) -> int:
    """Most bytes in memory while the cross entropy of `tokens` tokens runs forward and backward, inputs and the weight's buffer aside."""
    config = load_recipe(words)
    with start(config.parallel, config.seed) as state, patch.object(loss_module, "CHUNK_ELEMENTS", chunk_elements):
        hidden = torch.randn(tokens, config.model.hidden_size, requires_grad=True)
        weight = torch.randn(config.model.vocab_size // config.parallel.tensor, config.model.hidden_size, requires_grad=True)
        weight.main_grad = torch.zeros_like(weight)
        targets, weights = torch.zeros(tokens, dtype=torch.long), torch.ones(tokens)
        with Allocated() as allocated:
            loss_module.linear_cross_entropy(hidden, weight, targets, weights, state.groups.tp, add_to_buffer=True)[0].backward()
        return allocated.most


def sent_to_tensor_ranks(words: list[str]) -> float:
    """Bytes of hidden states and their gradients that this rank sends in one step, by ring algorithms."""
    config = load_recipe(words)
    sent, hidden_size = 0.0, config.model.hidden_size

    def counted(collective, factor: float):
        def run(first, *args, **more):
            nonlocal sent
            tensors = [first, *(x for x in args if isinstance(x, torch.Tensor))]
            if tensors[0].dim() == 3 and tensors[0].shape[-1] == hidden_size:
                sent += factor * max(x.numel() for x in tensors) * first.element_size()
            return collective(first, *args, **more)

        return run

    with start(config.parallel, config.seed) as state, contextlib.ExitStack() as patches:
        trainer = build_trainer(config, state, open_dataset(config, "train"), None)
        over = (config.parallel.tensor - 1) / config.parallel.tensor
        for module in (mappings, layers):
            for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
                patches.enter_context(patch.object(module, name, counted(getattr(module, name), over)))
        patches.enter_context(patch.object(dist, "all_reduce", counted(dist.all_reduce, 2 * over)))
        train_step(config, trainer.model, trainer.optimizer, trainer.train_stream, 0, state, Stability(config).judge)
    return sent
