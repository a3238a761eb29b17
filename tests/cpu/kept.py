"""What a mixing layer keeps for its backward pass, as autograd keeps it."""

import torch
from torch import Tensor

from hybrid_megatron.model.mixer_layer import MixerLayer
from hybrid_megatron.parallel import SequenceLayout


def bytes_kept(mixing: MixerLayer, hidden: Tensor, layout: SequenceLayout, model: torch.nn.Module) -> int:
    """Beside the parameters of `model`, the input `hidden`, tables of positions, which all layers share, and the output projection's own
    input, unless that is a kernel's output too. Each piece of memory counts once, and whole."""
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        kept.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    known = {x.untyped_storage().data_ptr() for x in (*model.parameters(), hidden)}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        _graph = mixing(hidden, packed_seq_params=layout)
    known |= kept.keys()  # alive with the graph: what the second pass keeps of it are tables
    kept = {}

    def forget(module, inputs: tuple[Tensor, ...]) -> None:
        known.update({inputs[0].untyped_storage().data_ptr()} - kept.keys())

    with mixing.out_proj.register_forward_pre_hook(forget), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        mixing(hidden, packed_seq_params=layout)
    return sum(x.untyped_storage().nbytes() for place, x in kept.items() if place not in known)
