"""What this project asks of transformer_engine.pytorch, in torch: for tests of its modules where Transformer Engine is not installed."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

OURS = ("hybrid_megatron.model.transformer_engine", "hybrid_megatron.model.attention.transformer_engine")


class Linear(torch.nn.Module):
    """Of one process. Has a state beside its parameters, as the real one for FP8."""

    def __init__(self, in_features, out_features, *, bias, sequence_parallel, tp_group, parallel_mode, params_dtype, init_method, device):
        super().__init__()
        assert not bias and tp_group.size() == 1 and parallel_mode in ("column", "row")
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        init_method(self.weight)
        self.tp_group, self.fuse_wgrad_accumulation = tp_group, False

    def _get_weight_tensors(self) -> list[Tensor]:
        return [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, *self._get_weight_tensors())

    def get_extra_state(self) -> Tensor:
        return torch.ones(1)

    def set_extra_state(self, state: Tensor) -> None:
        assert torch.equal(state, torch.ones(1))


class RMSNorm(torch.nn.RMSNorm):
    def __init__(self, normalized_shape, *, eps, dtype, device, sequence_parallel):
        super().__init__(normalized_shape, eps=eps, dtype=dtype, device=device)
        self.weight.sequence_parallel = sequence_parallel

    get_extra_state, set_extra_state = Linear.get_extra_state, Linear.set_extra_state


class DotProductAttention(torch.nn.Module):
    def __init__(self, heads, width, *, num_gqa_groups, attention_dropout, qkv_format, attn_mask_type, softmax_scale):
        super().__init__()
        assert attention_dropout == 0 and qkv_format == "sbhd"
        self.square, self.grouped, self.scale = attn_mask_type == "causal", heads != num_gqa_groups, softmax_scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[s, b, heads, width] -> [s, b, heads * width]."""
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        assert self.square == (len(q) == len(k))
        for x in (q, k, v):  # the real one goes wrong on other memory
            assert x.is_contiguous() and x.untyped_storage().nbytes() == x.numel() * x.element_size()
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, seen, scale=self.scale, enable_gqa=self.grouped).permute(2, 0, 1, 3).flatten(2)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test; in place of the real one as well."""
    module = ModuleType("transformer_engine.pytorch")
    vars(module).update({each.__name__: each for each in (Linear, RMSNorm, DotProductAttention)})
    package = SimpleNamespace(pytorch=module, __path__=[])
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
    for name in OURS:  # made anew from it, and gone afterwards
        monkeypatch.delitem(sys.modules, name, raising=False)
        parent, child = name.rsplit(".", 1)
        monkeypatch.delattr(sys.modules[parent], child, raising=False)
