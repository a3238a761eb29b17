"""What the softmax mixers `attention` and `swa` share: queries, keys and values, QK norm, RoPE, output gate."""

from abc import abstractmethod

from torch import Tensor

from hybrid_megatron.config.schema import ModelConfig, ParallelConfig, SoftmaxConfig
from hybrid_megatron.model.attention.rope import rotate
from hybrid_megatron.model.head_group import HeadGroup
from hybrid_megatron.model.mixers import definitions
from hybrid_megatron.model.mixers.base import CACHE_BYTES, Mixer
from hybrid_megatron.ops.fused import fused
from hybrid_megatron.ops.gated_norm import GATES
from hybrid_megatron.parallel import SequenceLayout


class SoftmaxMixer(Mixer):
    """A unit is one key-value head with the query heads that share it: rows [q of each query head, k, v, output gate of each head]."""

    @staticmethod
    @abstractmethod
    def settings(model: ModelConfig) -> SoftmaxConfig:
        """This mixer's section of the recipe."""

    @staticmethod
    @abstractmethod
    def sight(model: ModelConfig, group: HeadGroup) -> int | None:
        """Tokens that a token sees, itself included; None: all before it."""

    @staticmethod
    def queries(model: ModelConfig) -> int:
        """Query heads of a unit."""
        return model.num_heads // (model.num_kv_heads or model.num_heads)

    @classmethod
    def units(cls, model: ModelConfig, group: HeadGroup) -> int:
        return group.heads // cls.queries(model)

    @classmethod
    def rows(cls, model: ModelConfig, group: HeadGroup) -> dict[str, int]:
        wide = cls.queries(model) * model.head_dim
        gate = {} if cls.settings(model).output_gate == "none" else {"z": wide}
        return {"q": wide, "k": model.head_dim, "v": model.head_dim} | gate

    @classmethod
    def columns(cls, model: ModelConfig, group: HeadGroup) -> int:
        return cls.queries(model) * model.head_dim

    @classmethod
    def inner_params(cls, model: ModelConfig, group: HeadGroup) -> int:
        return 2 * model.head_dim if cls.settings(model).qk_norm else 0

    @classmethod
    def whole_params(cls, model: ModelConfig, group: HeadGroup) -> int:
        return cls.inner_params(model, group)

    @classmethod
    def inner_flops(cls, model: ModelConfig, group: HeadGroup, tokens: int, context: int) -> int:
        """q k^T and p v over the keys seen: token t sees min(t + 1, window) of them."""
        window = min(cls.sight(model, group) or context, context)
        seen = window * (window + 1) // 2 + (context - window) * window  # of a whole sample
        return 4 * tokens * group.heads * model.head_dim * seen // context

    @classmethod
    def state_bytes(cls, model: ModelConfig, group: HeadGroup, context: int) -> int:
        kept = min(cls.sight(model, group) or context, context)
        return CACHE_BYTES * 2 * cls.units(model, group) * model.head_dim * kept

    @classmethod
    def activation_bytes(cls, model: ModelConfig, group: HeadGroup, tokens: int, element: int) -> int:
        settings, rows = cls.settings(model), sum(cls.rows(model, group).values())
        queries, keys = group.heads * model.head_dim, cls.units(model, group) * model.head_dim
        kept = cls.units(model, group) * rows + queries  # the projected rows, and the output
        if settings.qk_norm or group.position == "rope":
            kept += queries + keys  # q and k as the kernel takes them
        sums = group.heads  # the softmax's, in float32
        if settings.qk_norm:
            sums += group.heads + cls.units(model, group)  # root mean squares
        return tokens * (kept * element + 4 * sums)

    @classmethod
    def keeps_its_output(cls, model: ModelConfig) -> bool:
        return cls.settings(model).output_gate == "none"

    @classmethod
    def check(cls, model: ModelConfig, group: HeadGroup, parallel: ParallelConfig, context: int) -> list[str]:
        problems = super().check(model, group, parallel, context)
        kv, gate = model.num_kv_heads or model.num_heads, cls.settings(model).output_gate
        if gate not in ("none", *GATES):
            problems.append(f"model.{group.mixer}.output_gate={gate}: it must be one of none, {', '.join(GATES)}")
        if model.num_heads % kv:
            problems.append(f"model.num_kv_heads={kv}: it must divide model.num_heads={model.num_heads}")
        elif group.heads % cls.queries(model):
            problems.append(
                f"pattern: {group} has {group.heads} heads of a layer, and with model.num_kv_heads={kv} every {cls.queries(model)} query "
                f"heads share keys and values; give it a multiple of {cls.queries(model)} heads, or raise model.num_kv_heads"
            )
        return problems

    def __init__(self, config, model, group, parallel, ranks, layer_number):
        super().__init__(config, model, group, parallel, ranks, layer_number)
        if self.settings(model).qk_norm:
            self.q_norm, self.k_norm = self._norm_weight(), self._norm_weight()

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout) -> Tensor:
        """q [b, s, n, d] over k, v [b, s, m, d] -> [b, s, n, d]."""

    def rope_base(self, layout: SequenceLayout) -> float:
        return self.settings(self.model).rope_base

    def mix(self, parts: dict[str, Tensor], layout: SequenceLayout) -> Tensor:
        settings = self.settings(self.model)
        q, k, v = (parts[name].unflatten(-1, (-1, self.model.head_dim)).flatten(2, 3) for name in ("q", "k", "v"))
        if settings.qk_norm:
            # Turned round, the norm's result lies sequence first as the projection does; attention gives its output the order of q.
            q, k = (self._norm(x.transpose(0, 1), weight).transpose(0, 1) for x, weight in ((q, self.q_norm), (k, self.k_norm)))
        if self.group.position == "rope":
            base = self.rope_base(layout)
            q, k = rotate(q, layout, base), rotate(k, layout, base)
        o = self.attend(q, k, v, layout).unflatten(2, (self.local_units, -1)).flatten(3)
        return o if settings.output_gate == "none" else _gated(o, parts["z"], gate=settings.output_gate)

    @classmethod
    def reference(
        cls, parts: dict[str, Tensor], weights: dict[str, Tensor], model: ModelConfig, group: HeadGroup, document_starts: Tensor | None
    ) -> Tensor:
        settings = cls.settings(model)
        q, k, v = (definitions.rows_of_heads(parts[name], model.head_dim) for name in ("q", "k", "v"))
        q, k = definitions.normalised_and_turned(q, k, weights, settings, model, group.position)
        k, v = (x.repeat_interleave(cls.queries(model), dim=2) for x in (k, v))
        seen = definitions.visible(q.shape[1], cls.sight(model, group), document_starts, q.device)
        o = definitions.softmax_attention(q, k, v, seen).unflatten(2, (-1, cls.queries(model))).flatten(3)
        return o if settings.output_gate == "none" else o * definitions.gate(parts["z"], settings.output_gate)


@fused
def _gated(o: Tensor, z: Tensor, *, gate: str) -> Tensor:
    return o * GATES[gate](z)
