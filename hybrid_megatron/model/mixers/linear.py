"""What the linear mixers but rwkv7 share: projections, short convolution, QK norm, RoPE, the recurrence over ranks, output norm, gate."""

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.config.schema import LinearConfig, ModelConfig, ParallelConfig
from hybrid_megatron.model.attention.rope import rotate
from hybrid_megatron.model.head_group import HeadGroup
from hybrid_megatron.model.mixers import definitions
from hybrid_megatron.model.mixers.base import CACHE_BYTES, STATE_BYTES
from hybrid_megatron.model.mixers.recurrent import RecurrentMixer
from hybrid_megatron.ops.fused import fused
from hybrid_megatron.ops.gated_norm import GATES, gated_norm
from hybrid_megatron.ops.recurrence import Recurrence
from hybrid_megatron.ops.short_convolution import short_convolution
from hybrid_megatron.ops.silu import silu, unit_silu
from hybrid_megatron.ops.state_passing import pieces_side_by_side
from hybrid_megatron.parallel import SequenceLayout
from hybrid_megatron.parallel.halo import busiest_halo


class LinearMixer(RecurrentMixer):
    """A unit is one key-value head with the query heads that share it (one, unless num_kv_heads says otherwise): rows [q of each query
    head, k, v, output gate of each query head, the mixer's own gates].

    q, k and v pass through the short convolution and its SiLU, q and k through QK norm and RoPE; then the recurrence with scale d^-1/2
    unless the mixer says otherwise, an RMSNorm of each head's output with one weight for all heads, and the output gate. Gates, states and
    norm statistics are float32.
    """

    activates = False
    """Whether q, k and v pass through SiLU without a convolution too."""
    unit_length = False
    """Whether q and k are L2-normalised, last of all; those that are pass through SiLU."""
    positions_within_documents = False
    """Whether RoPE counts from the start of each masked document, because not only distances matter."""

    @staticmethod
    @abstractmethod
    def settings(model: ModelConfig) -> LinearConfig:
        """This mixer's section of the recipe."""

    @staticmethod
    @abstractmethod
    def gates(model: ModelConfig) -> dict[str, int]:
        """Named rows of the mixer's own gates for one query head."""

    @staticmethod
    @abstractmethod
    def gate_elements(model: ModelConfig) -> int:
        """float32 elements of the gates that the recurrence takes, for one head and token."""

    @staticmethod
    @abstractmethod
    def kernel_bytes(model: ModelConfig, element: int) -> int:
        """What gates, their making and the kernel keep for the backward pass beside q, k, v and o, for one head and token."""

    @staticmethod
    @abstractmethod
    def transition_columns(model: ModelConfig) -> int:
        """Elements, for each row of a head's state, of what a span of tokens does to the state before it (see ops/recurrence.py)."""

    @staticmethod
    def scale(model: ModelConfig) -> float:
        """What q S is multiplied by."""
        return model.head_dim**-0.5

    @classmethod
    def queries(cls, model: ModelConfig) -> int:
        """Query heads of a unit."""
        return model.num_heads // (cls.settings(model).num_kv_heads or model.num_heads)

    @classmethod
    def units(cls, model: ModelConfig, group: HeadGroup) -> int:
        return group.heads // cls.queries(model)

    @classmethod
    def rows(cls, model: ModelConfig, group: HeadGroup) -> dict[str, int]:
        queries, width = cls.queries(model), model.head_dim
        gate = {} if cls.settings(model).output_gate == "none" else {"z": queries * width}
        own = {name: queries * size for name, size in cls.gates(model).items()}
        return {"q": queries * width, "k": width, "v": width} | gate | own

    @classmethod
    def columns(cls, model: ModelConfig, group: HeadGroup) -> int:
        return cls.queries(model) * model.head_dim

    @classmethod
    def inner_params(cls, model: ModelConfig, group: HeadGroup) -> int:
        """Output norm, QK norms and convolutions; subclasses add their gates'."""
        settings, channels = cls.settings(model), (group.heads + 2 * cls.units(model, group)) * model.head_dim
        return cls.whole_params(model, group) + channels * settings.short_conv

    @classmethod
    def whole_params(cls, model: ModelConfig, group: HeadGroup) -> int:
        """Norms of each head, one weight for all heads."""
        return model.head_dim * (3 if cls.settings(model).qk_norm else 1)

    @classmethod
    def inner_flops(cls, model: ModelConfig, group: HeadGroup, tokens: int, context: int) -> int:
        """The convolution, and the recurrence as written: so many multiply-adds per element of the state."""
        channels = (group.heads + 2 * cls.units(model, group)) * model.head_dim
        return 2 * tokens * (channels * cls.settings(model).short_conv + cls._state_products * group.heads * model.head_dim**2)

    _state_products = 2
    """Multiply-adds a token for each element of a head's state: the outer product k^T v, and q S."""

    @classmethod
    def state_bytes(cls, model: ModelConfig, group: HeadGroup, context: int) -> int:
        """A state a head, and the convolution's last tokens."""
        conv = max(cls.settings(model).short_conv - 1, 0) * (group.heads + 2 * cls.units(model, group)) * model.head_dim
        return STATE_BYTES * group.heads * model.head_dim**2 + CACHE_BYTES * conv

    @classmethod
    def activation_bytes(cls, model: ModelConfig, group: HeadGroup, tokens: int, element: int) -> int:
        settings, units = cls.settings(model), cls.units(model, group)
        wide, narrow = group.heads * model.head_dim, units * model.head_dim
        kept = units * sum(cls.rows(model, group).values()) + sum(cls.shared_rows(model, group).values())
        kept += 4 * wide  # q, k and v as the kernel takes them, and its output
        if settings.short_conv:
            kept += wide + 2 * narrow  # what SiLU takes
        if settings.qk_norm and (settings.short_conv or cls.activates):
            kept += wide + narrow  # what the norms take
        if cls.unit_length and not cls._at_once(model):
            kept += wide + narrow  # what the L2 norms take
        sums = group.heads if settings.output_gate == "none" else 0  # root mean squares; with a gate they are computed again
        sums += group.heads + units if settings.qk_norm else 0
        convolved = (wide + 2 * narrow) if settings.short_conv else 0  # in float32
        return tokens * (kept * element + 4 * (sums + convolved) + group.heads * cls.kernel_bytes(model, element))

    @classmethod
    def context_bytes(cls, model: ModelConfig, group: HeadGroup, context: int, parallel: ParallelConfig, element: int) -> int:
        """The halo of the convolution, and the summaries of all other chunks (two a rank), or q, k, v, gates and o as heads and back."""
        size, width, heads = parallel.context, model.head_dim, group.heads // parallel.tensor
        if size == 1:
            return 0
        halo = cls._halo_bytes(model, group, context, parallel, element)
        if parallel.context_linear == "states":
            return halo + 2 * (size - 1) * heads * width * (width + cls.transition_columns(model)) * STATE_BYTES
        moved = 4 * width * element + cls.gate_elements(model) * 4
        return halo + context // size * heads * moved * (size - 1) // size

    @classmethod
    def context_backward_bytes(cls, model: ModelConfig, group: HeadGroup, context: int, parallel: ParallelConfig, element: int) -> int:
        """With states: no transitions."""
        size, width, heads = parallel.context, model.head_dim, group.heads // parallel.tensor
        if size == 1 or parallel.context_linear != "states":
            return cls.context_bytes(model, group, context, parallel, element)
        return cls._halo_bytes(model, group, context, parallel, element) + 2 * (size - 1) * heads * width**2 * STATE_BYTES

    @classmethod
    def _halo_bytes(cls, model: ModelConfig, group: HeadGroup, context: int, parallel: ParallelConfig, element: int) -> int:
        channels = (group.heads + 2 * cls.units(model, group)) // parallel.tensor * model.head_dim
        return busiest_halo(max(cls.settings(model).short_conv - 1, 0), context, parallel.context) * channels * element

    @classmethod
    def context_kept_bytes(cls, model: ModelConfig, group: HeadGroup, context: int, parallel: ParallelConfig, element: int) -> int:
        """With states: also, of the two chunks at hand, what passing them keeps."""
        received = cls.context_bytes(model, group, context, parallel, element)
        if parallel.context == 1 or parallel.context_linear != "states":
            return received
        return received + group.heads // parallel.tensor * cls._passing_bytes(model, context // parallel.context, 2)

    @classmethod
    def pieces_kept_bytes(cls, model: ModelConfig, group: HeadGroup, samples: int, context: int, tensor: int) -> int:
        heads = group.heads // tensor
        pieces = pieces_side_by_side(samples * heads, context)
        return samples * heads * cls._passing_bytes(model, context, pieces) if pieces > 1 else 0

    @classmethod
    def _passing_bytes(cls, model: ModelConfig, tokens: int, pieces: int) -> int:
        """Of one head: of each piece its summary and the state it starts from, and gates of which the kernel keeps sums alone."""
        states = model.head_dim * (2 * model.head_dim + cls.transition_columns(model))
        return tokens * 4 * cls.gates_kept_as_sums(model) + pieces * states * STATE_BYTES

    @classmethod
    def gates_kept_as_sums(cls, model: ModelConfig) -> int:
        """Of `gate_elements`, those whose sums the kernel keeps instead of them."""
        return min(cls.gate_elements(model), 1)

    @classmethod
    def check(cls, model: ModelConfig, group: HeadGroup, parallel: ParallelConfig, context: int) -> list[str]:
        problems = super().check(model, group, parallel, context)
        settings, name = cls.settings(model), group.mixer
        if settings.output_gate not in ("none", *GATES):
            problems.append(f"model.{name}.output_gate={settings.output_gate}: it must be one of none, {', '.join(GATES)}")
        if settings.num_kv_heads is not None and model.num_heads % settings.num_kv_heads:
            problems.append(f"model.{name}.num_kv_heads={settings.num_kv_heads}: it must divide model.num_heads={model.num_heads}")
        elif group.heads % cls.queries(model):
            problems.append(
                f"pattern: {group} has {group.heads} heads of a layer, and with model.{name}.num_kv_heads={settings.num_kv_heads} every "
                f"{cls.queries(model)} query heads share keys and values; give it a multiple of that many heads, or leave it null"
            )
        return problems

    def __init__(self, config, model, group, parallel, ranks, layer_number):
        super().__init__(config, model, group, parallel, ranks, layer_number)
        settings = self.settings(model)
        if settings.qk_norm:
            self.q_norm, self.k_norm = self._norm_weight(), self._norm_weight()
        if settings.short_conv:
            widths = {"q": self.local_heads, "k": self.local_units, "v": self.local_units}
            for name, heads in widths.items():
                shape = (heads * model.head_dim, settings.short_conv)
                setattr(self, f"conv_{name}", self._parameter(shape, _draw_convolution, per_unit=True, decayed=True))
        self.out_norm = self._norm_weight()

    @abstractmethod
    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, parts: dict[str, Tensor]) -> tuple[Recurrence, tuple[Tensor, ...]]:
        """The recurrence and its inputs, from q, k, v [b, s, n, d] as it takes them, each head with its own keys and values, and the rows
        of the gates."""

    def mix(self, parts: dict[str, Tensor], layout: SequenceLayout) -> Tensor:
        settings = self.settings(self.model)
        v = self._convolved(parts["v"], "v", layout)
        if self._at_once(self.model):  # RoPE behind it leaves all lengths as they are
            q, k = (unit_silu(self._by_head(parts[name])) for name in ("q", "k"))
        else:
            q, k = (self._convolved(parts[name], name, layout) for name in ("q", "k"))
        if settings.qk_norm:
            q, k = self._norm(q, self.q_norm), self._norm(k, self.k_norm)
        if self.group.position == "rope":
            within = self.positions_within_documents
            q, k = (rotate(x, layout, settings.rope_base, within_documents=within, batch_first=True) for x in (q, k))
        if self.unit_length and not self._at_once(self.model):
            q, k = of_length_one(q), of_length_one(k)
        if self.queries(self.model) > 1:
            k, v = (x.repeat_interleave(self.queries(self.model), dim=2) for x in (k, v))
        o = self._mixed(q, k, v, parts, layout)
        if settings.output_gate == "none":
            o = self._norm(o, self.out_norm)
        else:
            z = self._by_head(self._gate_rows(parts))
            o = gated_norm(o, self._for_all_heads(self.out_norm), z, self.model.norm_eps, settings.output_gate)
        return o.unflatten(2, (self.local_units, -1)).flatten(3)

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, parts: dict[str, Tensor], layout: SequenceLayout) -> Tensor:
        """What comes before the output norm [b, s, n, d]."""
        return self._recur(*self.recurrence(q, k, v, parts), self.scale(self.model), layout)

    def _gate_rows(self, parts: dict[str, Tensor]) -> Tensor:
        """What the output gate is made of [b, s, units, columns]."""
        return parts["z"]

    def _convolved(self, x: Tensor, name: str, layout: SequenceLayout) -> Tensor:
        """[b, s, units, heads of a unit * d] -> [b, s, heads, d]."""
        if self.settings(self.model).short_conv:
            x = short_convolution(x.flatten(2), getattr(self, f"conv_{name}"), layout, self.ranks.cp)
            return silu(x.unflatten(-1, (-1, self.model.head_dim)))
        x = self._by_head(x)
        return silu(x) if self.activates else x

    def _by_head(self, x: Tensor) -> Tensor:
        """[b, s, units, heads of a unit * d] -> [b, s, heads, d]."""
        return x.unflatten(-1, (-1, self.model.head_dim)).flatten(2, 3)

    @classmethod
    def _at_once(cls, model: ModelConfig) -> bool:
        """Whether nothing stands between SiLU and L2 norm of q and k, so that both are one kernel and only the projected rows are kept."""
        return cls.unit_length and not cls.settings(model).short_conv and not cls.settings(model).qk_norm

    @classmethod
    def reference(
        cls, parts: dict[str, Tensor], weights: dict[str, Tensor], model: ModelConfig, group: HeadGroup, document_starts: Tensor | None
    ) -> Tensor:
        settings, width, queries = cls.settings(model), model.head_dim, cls.queries(model)
        q, k, v = (parts[name].flatten(2) for name in ("q", "k", "v"))
        if settings.short_conv:
            q, k, v = (
                definitions.gate(definitions.convolve(x, weights[f"conv_{name}"], document_starts), "silu")
                for name, x in (("q", q), ("k", k), ("v", v))
            )
        elif cls.activates:
            q, k, v = (definitions.gate(x, "silu") for x in (q, k, v))
        q, k, v = (x.unflatten(-1, (-1, width)) for x in (q, k, v))
        starts = document_starts if cls.positions_within_documents else None
        q, k = definitions.normalised_and_turned(q, k, weights, settings, model, group.position, starts)
        k, v = (x.repeat_interleave(queries, dim=2) for x in (k, v))
        o = cls.recur_by_definition(q, k, v, parts, weights, model, document_starts)
        o = definitions.rms_norm(o, weights["out_norm"], model.norm_eps).unflatten(2, (-1, queries)).flatten(3)
        if settings.output_gate == "none":
            return o
        return o * definitions.gate(cls.gate_rows_by_definition(parts, weights, model), settings.output_gate)

    @classmethod
    def gate_rows_by_definition(cls, parts: dict[str, Tensor], weights: dict[str, Tensor], model: ModelConfig) -> Tensor:
        """What the output gate is made of [b, s, units, columns]."""
        return parts["z"]

    @staticmethod
    @abstractmethod
    def recur_by_definition(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        parts: dict[str, Tensor],
        weights: dict[str, Tensor],
        model: ModelConfig,
        document_starts: Tensor | None,
    ) -> Tensor:
        """The gates and the recurrence, token by token, and what comes before the output norm: [b, s, n, d]."""


@fused
def of_length_one(x: Tensor) -> Tensor:
    """L2-normalised over the last dimension, in float32 or wider."""
    return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1).to(x.dtype)


def _draw_convolution(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform within 1 / sqrt(width), as torch's Conv1d draws a convolution of single channels."""
    return (2 * torch.rand(shape, generator=generator) - 1) * shape[1] ** -0.5
