"""Mixer `rwkv7`: the time mixing of RWKV-7 (Peng et al., 2025, arXiv 2503.14456).

x_i = x_t + m_i (x_{t-1} - x_t) is the layer's input after the token shift, with a mix m_i of its own for each i. Then, per head,

    r = W_r x_r    k = W_k x_k    v = W_v x_v
    log decay   g = -e^(-1/2) sigmoid(w_0 + W2 tanh(W1 x_w))
    rate        a = sigmoid(a_0 + A2 A1 x_a)
    removal key kk = k k_k of length one;  key k <- k (1 + (a - 1) k_a)
    S_t = (Diag(e^g) - (kk a)^T kk) S_{t-1} + k^T v
    out = (GroupNorm(r S_t) + (sum r k r_k) v) G2 sigmoid(G1 x_g)

with a GroupNorm of each head, weight and bias of each channel, eps head_dim * norm_eps (64e-5 at 64). With position `rope`, which RWKV-7
does not have, r and k turn as soon as they are projected, and the removal key with k.

It departs from the frame of the other linear mixers where RWKV-7 does: it projects the layer's input itself, since each projection sees
another mix of it; scale 1; its own norm and low-rank output gate; no QK norm, convolution or shared keys. RWKV-7's value residual is not
there: v mixed with the first layer's v ties all layers of a model to one, across pipeline stages and recomputed layers, while a layer of a
hybrid stands by itself (HypeNet converts its layers one by one). Its channel mixing gives way to SwiGLU, its zero output projection to the
model's own draw, and all parameters have one learning rate (RWKV-7 doubles that of w_0).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.config.schema import ModelConfig, ParallelConfig
from hybrid_megatron.model.attention.rope import rotate
from hybrid_megatron.model.head_group import HeadGroup
from hybrid_megatron.model.mixers import definitions, rwkv7_initial
from hybrid_megatron.model.mixers.base import CACHE_BYTES, STATE_BYTES
from hybrid_megatron.model.mixers.recurrent import RecurrentMixer
from hybrid_megatron.ops.generalized_delta_rule import GeneralizedDeltaRule
from hybrid_megatron.ops.rwkv7_inputs import recurrence_inputs
from hybrid_megatron.ops.rwkv7_output import finished
from hybrid_megatron.ops.token_shift import shifted_projections
from hybrid_megatron.parallel import SequenceLayout
from hybrid_megatron.parallel.halo import busiest_halo

MIXES = ("r", "k", "v", "w", "a", "g")
"""The order of the rows of `shift_mix`."""


class RWKV7(RecurrentMixer):
    """A unit is one head. Parameters of the group's channels (its heads times head_dim), split with the units:

    r_proj, k_proj, v_proj [channels, h]; decay_up (W2), rate_up (A2), gate_up (G2) [channels, rank]; decay_bias (w_0), rate_bias (a_0), in
    float32; k_k, k_a, r_k, out_norm_weight, out_norm_bias [channels]. Whole on every tensor rank: shift_mix [6, h], and decay_down (W1),
    rate_down (A1), gate_down (G1) [rank, h]. Without position unless asked.
    """

    default_position = "nope"
    widest_head = 256
    takes_input = True

    # --- what is known without building it -------------------------------------------------------------------------------------

    @classmethod
    def units(cls, model: ModelConfig, group: HeadGroup) -> int:
        return group.heads

    @classmethod
    def rows(cls, model: ModelConfig, group: HeadGroup) -> dict[str, int]:
        return {}

    @classmethod
    def columns(cls, model: ModelConfig, group: HeadGroup) -> int:
        return model.head_dim

    @staticmethod
    def ranks_of(model: ModelConfig) -> tuple[int, int, int]:
        """Widths of the bottlenecks of decay, rate and gate: as set, or those of RWKV-7 in multiples of 32, wider for wider heads."""
        settings, root, widening = model.rwkv7, model.hidden_size**0.5, model.head_dim / 64

        def in_32s(width: float) -> int:
            return max(32, round(width / 32) * 32)

        return (
            settings.decay_rank or in_32s(2.5 * root * widening),
            settings.rate_rank or in_32s(2.5 * root * widening),
            settings.gate_rank or in_32s(5 * root),
        )

    @classmethod
    def _projection_weights(cls, model: ModelConfig, group: HeadGroup) -> int:
        """Of r, k and v, and of the two matrices of each bottleneck."""
        channels = group.heads * model.head_dim
        return 3 * channels * model.hidden_size + sum(cls.ranks_of(model)) * (model.hidden_size + channels)

    @classmethod
    def inner_params(cls, model: ModelConfig, group: HeadGroup) -> int:
        return cls._projection_weights(model, group) + 6 * model.hidden_size + 7 * group.heads * model.head_dim

    @classmethod
    def whole_params(cls, model: ModelConfig, group: HeadGroup) -> int:
        """The mixes and the first matrices of the bottlenecks."""
        return (len(MIXES) + sum(cls.ranks_of(model))) * model.hidden_size

    @classmethod
    def float32_params(cls, model: ModelConfig, group: HeadGroup) -> int:
        return 2 * group.heads * model.head_dim

    @classmethod
    def inner_flops(cls, model: ModelConfig, group: HeadGroup, tokens: int, context: int) -> int:
        """Its projections, and four multiply-adds for each element of a head's state: kk S, the two outer products, r S."""
        return 2 * tokens * (cls._projection_weights(model, group) + 4 * group.heads * model.head_dim**2)

    @classmethod
    def state_bytes(cls, model: ModelConfig, group: HeadGroup, context: int) -> int:
        """A state a head, and the last token for the shift."""
        return STATE_BYTES * group.heads * model.head_dim**2 + CACHE_BYTES * model.hidden_size

    @classmethod
    def activation_bytes(cls, model: ModelConfig, group: HeadGroup, tokens: int, element: int) -> int:
        """By channel: k as projected, what sigmoid takes for decay and rate, r, v, k, a, b and g (float32) as the kernel takes them, its
        output, the gate. FLA's kernels compute everything else again. And the bottlenecks."""
        by_channel = 10 * element + 4
        return tokens * group.heads * model.head_dim * by_channel + cls.whole_activation_bytes(model, group, tokens, element)

    @classmethod
    def whole_activation_bytes(cls, model: ModelConfig, group: HeadGroup, tokens: int, element: int) -> int:
        return tokens * sum(cls.ranks_of(model)) * element

    @classmethod
    def context_bytes(cls, model: ModelConfig, group: HeadGroup, context: int, parallel: ParallelConfig, element: int) -> int:
        """The tokens before the chunks, and the summaries of all other chunks (two a rank), or r, k, v, a, b, g and o as heads and back."""
        size, width, heads = parallel.context, model.head_dim, group.heads // parallel.tensor
        if size == 1:
            return 0
        halo = busiest_halo(1, context, size) * model.hidden_size * element
        if parallel.context_linear == "states":
            return halo + 2 * (size - 1) * heads * width * 2 * width * STATE_BYTES
        return halo + context // size * heads * width * (6 * element + 4) * (size - 1) // size

    @classmethod
    def context_backward_bytes(cls, model: ModelConfig, group: HeadGroup, context: int, parallel: ParallelConfig, element: int) -> int:
        """With states: no transitions."""
        forward = cls.context_bytes(model, group, context, parallel, element)
        if parallel.context == 1 or parallel.context_linear != "states":
            return forward
        return forward - 2 * (parallel.context - 1) * group.heads // parallel.tensor * model.head_dim**2 * STATE_BYTES

    @classmethod
    def context_kept_bytes(cls, model: ModelConfig, group: HeadGroup, context: int, parallel: ParallelConfig, element: int) -> int:
        """With states: also, of the two chunks at hand, their summaries and the states they start from."""
        received = cls.context_bytes(model, group, context, parallel, element)
        if parallel.context == 1 or parallel.context_linear != "states":
            return received
        return received + 2 * group.heads // parallel.tensor * 3 * model.head_dim**2 * STATE_BYTES

    # --- the computation ---------------------------------------------------------------------------------------------------------

    def __init__(self, config, model, group, parallel, ranks, layer_number):
        super().__init__(config, model, group, parallel, ranks, layer_number)
        channels, hidden = self.local_heads * model.head_dim, model.hidden_size

        def initial(name: str):  # without `self`: a parameter that held its module would keep it, and its process groups, for ever
            return lambda shape, generator: rwkv7_initial.DRAWS[name](shape, generator, layer_number, model)

        for name in ("r_proj", "k_proj", "v_proj"):
            setattr(self, name, self._parameter((channels, hidden), initial(name), per_unit=True, decayed=True))
        for name, rank in zip(("decay", "rate", "gate"), self.ranks_of(model)):
            setattr(self, f"{name}_down", self._parameter((rank, hidden), initial("down"), per_unit=False))
            setattr(self, f"{name}_up", self._parameter((channels, rank), initial("up"), per_unit=True))
        for name in ("decay_bias", "rate_bias"):
            setattr(self, name, self._parameter(channels, initial(name), per_unit=True, dtype=torch.float32))
        for name in ("k_k", "k_a", "r_k", "out_norm_weight", "out_norm_bias"):
            setattr(self, name, self._parameter(channels, initial(name), per_unit=True))
        self.shift_mix = self._parameter((len(MIXES), hidden), initial("shift_mix"), per_unit=False)

    def mix(self, parts: dict[str, Tensor], layout: SequenceLayout) -> Tensor:
        r, k, v, low_decay, low_rate, low_gate = self._shifted(parts["x"], layout)
        r, k, v = (x.unflatten(-1, (self.local_heads, -1)) for x in (r, k, v))
        if self.group.position == "rope":
            # The two channels that RoPE turns together have gates of their own: positions count within documents.
            r, k = (rotate(x, layout, self.model.rwkv7.rope_base, within_documents=True, batch_first=True) for x in (r, k))
        decay, rate = F.linear(torch.tanh(low_decay), self.decay_up), F.linear(low_rate, self.rate_up)
        k, g, a, b = recurrence_inputs(k, decay, rate, self.decay_bias, self.rate_bias, self.k_k, self.k_a)
        o = self._recur(GeneralizedDeltaRule(), (r, k, v, g, a, b), 1.0, layout)
        gate = F.linear(torch.sigmoid(low_gate), self.gate_up)
        eps = self.model.head_dim * self.model.norm_eps
        return finished(o, r, k, v, gate, self.out_norm_weight, self.out_norm_bias, self.r_k, eps=eps)

    def _shifted(self, x: Tensor, layout: SequenceLayout) -> tuple[Tensor, ...]:
        """r, k, v [b, s, channels], and the bottlenecks of decay, rate and gate [b, s, rank]."""
        # What every tensor rank holds whole has a part of its gradient on each: that of the rank's own heads.
        downs = (self._for_all_heads(down) for down in (self.decay_down, self.rate_down, self.gate_down))
        weights = (self.r_proj, self.k_proj, self.v_proj, *downs)
        return shifted_projections(x, self._for_all_heads(self.shift_mix), weights, layout, self.ranks.cp)

    @classmethod
    def reference(
        cls, parts: dict[str, Tensor], weights: dict[str, Tensor], model: ModelConfig, group: HeadGroup, document_starts: Tensor | None
    ) -> Tensor:
        x, width = parts["x"], model.head_dim
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        if document_starts is not None:
            before = before.masked_fill(document_starts[..., None], 0.0)
        x_r, x_k, x_v, x_w, x_a, x_g = (x * (1 - mix) + before * mix for mix in weights["shift_mix"])

        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, width))

        r, k, v = heads(x_r @ weights["r_proj"].T), heads(x_k @ weights["k_proj"].T), heads(x_v @ weights["v_proj"].T)
        if group.position == "rope":
            r, k = (definitions.rotate(x, model.rwkv7.rope_base, document_starts) for x in (r, k))
        decay = (x_w @ weights["decay_down"].T).tanh() @ weights["decay_up"].T + weights["decay_bias"]
        g = heads(-math.exp(-0.5) * definitions.gate(decay, "sigmoid"))
        rate = heads(definitions.gate(x_a @ weights["rate_down"].T @ weights["rate_up"].T + weights["rate_bias"], "sigmoid"))
        gate = heads(definitions.gate(x_g @ weights["gate_down"].T, "sigmoid") @ weights["gate_up"].T)
        removed = k * heads(weights["k_k"])
        removed = removed / removed.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        k = k * (1 + (rate - 1) * heads(weights["k_a"]))
        inputs = (r, k, v, g, -removed, removed * rate)
        o, _ = GeneralizedDeltaRule().recurrent(inputs, scale=1.0, document_starts=document_starts)
        centred = o - o.mean(-1, keepdim=True)
        o = centred / (centred.square().mean(-1, keepdim=True) + width * model.norm_eps).sqrt()
        o = o * heads(weights["out_norm_weight"]) + heads(weights["out_norm_bias"])
        return (o + (r * k * heads(weights["r_k"])).sum(-1, keepdim=True) * v) * gate
