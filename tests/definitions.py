"""The mixers by their formulas, written from the mathematics alone and slow on purpose: what the tests compare with.

Nothing here imports the code under test. Row vectors, per head; `S` is [d_k, d_v]; log gates g <= 0. Everything works in the dtype and
on the device of its arguments, and is differentiable. Recurrences and kernels first, then each mixer between its projections, then the
assembly of a layer from its groups of heads.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = e^{g_t} (I - b_t k_t^T k_t) S_{t-1} + b_t k_t^T v_t and o_t = scale q_t S_t, the transition written out as a matrix.

    q, k [b, s, n, d_k]; v [b, s, n, d_v]; g, beta [b, s, n]; the state is zero again before
    every position where `starts` [b, s] is true.
    Returns outputs [b, s, n, d_v] and the last state [b, n, d_k, d_v].
    """
    b, s, n, d_k = k.shape
    eye = torch.eye(d_k, dtype=k.dtype, device=k.device)
    state = k.new_zeros(b, n, d_k, v.shape[-1]) if initial_state is None else initial_state
    outputs = []
    for t in range(s):
        if starts is not None:
            state = torch.where(starts[:, t, None, None, None], torch.zeros_like(state), state)
        key, value, rate = k[:, t, :, :, None], v[:, t, :, None, :], beta[:, t, :, None, None]  # a column, a row, a number
        transition = torch.exp(g[:, t])[..., None, None] * (eye - rate * key @ key.transpose(-1, -2))
        state = transition @ state + rate * key @ value
        outputs.append(scale * (q[:, t, :, None, :] @ state).squeeze(-2))
    return torch.stack(outputs, 1), state


def kimi_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = (I - b_t k_t^T k_t) Diag(e^{g_t}) S_{t-1} + b_t k_t^T v_t; shapes as for `gated_delta_rule`, but g [b, s, n, d_k]."""
    eye = torch.eye(k.shape[3], dtype=k.dtype, device=k.device)

    def transition(t: int) -> Tensor:
        return (eye - beta[:, t, :, None, None] * k[:, t, :, :, None] @ k[:, t, :, None, :]) @ torch.diag_embed(torch.exp(g[:, t]))

    return _with_transitions(q, k, beta[..., None] * v, transition, scale, initial_state, starts)


def scalar_decay(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, initial_state: Tensor | None = None, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S_t = e^{g_t} S_{t-1} + k_t^T v_t and o_t = scale q_t S_t, g [b, s, n]."""
    eye = torch.eye(k.shape[3], dtype=k.dtype, device=k.device)
    return _with_transitions(q, k, v, lambda t: torch.exp(g[:, t])[..., None, None] * eye, scale, initial_state, starts)


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, initial_state: Tensor | None = None, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S_t = Diag(e^{g_t}) S_{t-1} + k_t^T v_t and o_t = scale q_t S_t; shapes as for `gated_delta_rule`, but g [b, s, n, d_k]."""
    return _with_transitions(q, k, v, lambda t: torch.diag_embed(torch.exp(g[:, t])), scale, initial_state, starts)


def fixed_decay(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float, initial_state: Tensor | None = None, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S_t = gamma_h S_{t-1} + k_t^T v_t and o_t = scale q_t S_t, ln gamma_h = log_decay [n]."""
    transition = torch.diag_embed(torch.exp(log_decay)[:, None].expand(-1, k.shape[-1]))
    return _with_transitions(q, k, v, lambda t: transition, scale, initial_state, starts)


def generalized_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float,
    initial_state: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = (Diag(e^{g_t}) + b_t^T a_t) S_{t-1} + k_t^T v_t and o_t = scale q_t S_t; g, a, b [b, s, n, d_k]."""

    def transition(t: int) -> Tensor:
        return torch.diag_embed(torch.exp(g[:, t])) + b[:, t, :, :, None] @ a[:, t, :, None, :]

    return _with_transitions(q, k, v, transition, scale, initial_state, starts)


def _with_transitions(q, k, v, transition, scale, initial_state, starts) -> tuple[Tensor, Tensor]:
    """S_t = A_t S_{t-1} + k_t^T v_t with A_t = transition(t) [.., n, d_k, d_k]."""
    state = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3]) if initial_state is None else initial_state
    outputs = []
    for t in range(k.shape[1]):
        if starts is not None:
            state = torch.where(starts[:, t, None, None, None], torch.zeros_like(state), state)
        state = transition(t) @ state + k[:, t, :, :, None] @ v[:, t, :, None, :]
        outputs.append(scale * (q[:, t, :, None, :] @ state).squeeze(-2))
    return torch.stack(outputs, 1), state


def lightning_log_decay(heads: int) -> Tensor:
    """ln gamma_h = -2^(-8h/H) for h = 1 .. H, in float64."""
    return torch.tensor([-(2 ** (-8 * h / heads)) for h in range(1, heads + 1)], dtype=torch.float64)


def transition_product(k: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """M = the product of e^{g_t} (I - b_t k_t^T k_t), the latest on the left: [b, n, d_k, d_k]."""
    b, s, n, d_k = k.shape
    eye = torch.eye(d_k, dtype=k.dtype, device=k.device)
    product = eye.expand(b, n, d_k, d_k)
    for t in range(s):
        outer = torch.einsum("bni,bnj->bnij", k[:, t], k[:, t])
        product = torch.exp(g[:, t])[..., None, None] * (eye - beta[:, t, :, None, None] * outer) @ product
    return product


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, starts: Tensor | None = None, query_positions: Tensor | None = None
) -> Tensor:
    """Softmax over all positions up to the query's own, within its document; heads in groups share a key-value head.

    q [b, s_q, n, d]; k, v [b, s, n_kv, d]; `query_positions` [s_q] are the queries' places in the sequence, 0 .. s-1 by default.
    """
    s, group = k.shape[1], q.shape[2] // k.shape[2]
    positions = torch.arange(s, device=q.device)
    asked = positions if query_positions is None else query_positions
    visible = (positions[None, :] <= asked[:, None])[None]
    if starts is not None:
        document = starts.long().cumsum(1)
        visible = visible & (document[:, None, :] == document[:, asked, None])
    heads = []
    for head in range(q.shape[2]):
        logits = scale * q[:, :, head] @ k[:, :, head // group].transpose(-1, -2)
        heads.append(torch.softmax(logits.masked_fill(~visible, -torch.inf), -1) @ v[:, :, head // group])
    return torch.stack(heads, 2)


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, starts: Tensor | None = None) -> Tensor:
    """o_t = sum_j p_tj v_j, p_t the softmax of scale q_t k_j over j = t - window + 1 .. t, none of them before t's document.

    q [b, s, n, d]; k, v [b, s, n_kv, d].
    """
    s, group = k.shape[1], q.shape[2] // k.shape[2]
    band = torch.ones(s, s, device=q.device).tril().triu(1 - window).bool().expand(q.shape[0], s, s)
    if starts is not None:
        begun = starts.long().cumsum(1)  # documents begun up to each token: none may begin after j up to t
        band = band & (begun[:, :, None] == begun[:, None, :])
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    logits = torch.einsum("btnd,bjnd->bntj", q, k).masked_fill(~band[:, None], -torch.inf)
    return torch.einsum("bntj,bjnd->btnd", torch.softmax(scale * logits, -1), v)


def short_convolution(x: Tensor, weight: Tensor, starts: Tensor | None = None) -> Tensor:
    """y_t = sum_i weight[:, width - 1 - i] x_{t - i}, over the tokens of t's document alone. x [b, s, c], weight [c, width]."""
    rows = []
    for row in range(x.shape[0]):
        begin, outputs = 0, []
        for t in range(x.shape[1]):
            begin = t if starts is not None and starts[row, t] else begin
            seen = x[row, max(begin, t - weight.shape[1] + 1) : t + 1]
            outputs.append((seen * weight[:, weight.shape[1] - len(seen) :].T).sum(0))
        rows.append(torch.stack(outputs))
    return torch.stack(rows)


def rope(x: Tensor, base: float, positions: Tensor | None = None) -> Tensor:
    """Turn the pair (x_i, x_{i + d/2}) of x [b, s, n, d] by position * base^(-2i/d), as a complex number is turned."""
    s, half = x.shape[1], x.shape[-1] // 2
    positions = torch.arange(s, device=x.device) if positions is None else positions
    frequency = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) * 2 / x.shape[-1])
    angle = (positions.double()[:, None] * frequency)[None, :, None, :]
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x over the root of its mean square, times weight."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def unit(x: Tensor) -> Tensor:
    """x over its length."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True))


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x)."""
    return x / (1 + torch.exp(-x))


def gdn_gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, allow_neg_eigval: bool) -> tuple[Tensor, Tensor]:
    """g = -e^A softplus(W_a x + dt), b = sigmoid(W_b x), twice that with `allow_neg_eigval`."""
    g = -torch.exp(A_log) * torch.log(1 + torch.exp(a + dt_bias))
    return g, torch.sigmoid(b) * (2.0 if allow_neg_eigval else 1.0)


def kda_gates(low: Tensor, up: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """g = -e^A softplus(W_2 W_1 x + dt) for low = W_1 x [b, s, rank], W_2 [n d, rank], dt [n d], A [n]: [b, s, n, d]."""
    return -torch.exp(A_log)[:, None] * torch.log(1 + torch.exp(low @ up.T + dt_bias)).unflatten(-1, (len(A_log), -1))


def gla_gates(low: Tensor, up: Tensor, bias: Tensor, temperature: float) -> Tensor:
    """g = logsigmoid(W_2 W_1 x + b) / temperature for low = W_1 x [b, s, rank], W_2 [n d, rank]; flat over heads and channels."""
    return -torch.log(1 + torch.exp(-(low @ up.T + bias))) / temperature


@dataclass(frozen=True)
class Group:
    """Heads of one mixer in a layer, and what they are computed with."""

    mixer: str
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_base: float | None
    """None carries no position."""
    qk_norm: bool
    output_gate: str
    """none, silu or sigmoid."""
    short_conv: int = 0
    window: int | None = None
    gate_rank: int = 0
    gate_temperature: float | None = None
    allow_neg_eigval: bool = False

    @property
    def queries(self) -> int:
        """Query heads of a unit, which is one key-value head with them."""
        return self.heads // self.kv_heads

    def unit_rows(self) -> list[tuple[str, int]]:
        """Rows of the input projection for one unit, in order."""
        if self.mixer == "rwkv7":
            return []  # it projects the layer's input itself
        rows = [("q", self.queries * self.head_dim), ("k", self.head_dim), ("v", self.head_dim)]
        rows += [("z", self.queries * self.head_dim)] if self.output_gate != "none" and self.mixer != "kda" else []
        return rows + [(name, self.queries) for name in {"gdn": ("a", "b"), "kda": ("b",), "mamba2": ("dt",)}.get(self.mixer, ())]

    def shared_rows(self) -> list[tuple[str, int]]:
        """Rows of the projection that all units share, in order."""
        if self.mixer == "kda":
            return [("low", self.head_dim)] + ([("low_z", self.head_dim)] if self.output_gate != "none" else [])
        return [("low", self.gate_rank)] if self.mixer == "gla" else []


Parts = dict[str, Tensor]
"""What a group's projections give: q, z [b, s, n, d]; k, v [b, s, n_kv, d]; a, b, dt [b, s, n]; low, low_z [b, s, rank]; those it has. For
rwkv7 x [b, s, h], the layer's input."""


def attention(x: Parts, own: dict[str, Tensor], group: Group, starts: Tensor | None) -> Tensor:
    """Softmax attention over all earlier tokens: [b, s, n, d]. `own` holds the group's parameters."""
    q, k = positioned(normalised(x["q"], own, "q_norm", group), group), positioned(normalised(x["k"], own, "k_norm", group), group)
    return gated(causal_attention(q, k, x["v"], group.head_dim**-0.5, starts), x, group)


def swa(x: Parts, own: dict[str, Tensor], group: Group, starts: Tensor | None) -> Tensor:
    """Softmax attention over the last `window` tokens."""
    q, k = positioned(normalised(x["q"], own, "q_norm", group), group), positioned(normalised(x["k"], own, "k_norm", group), group)
    return gated(windowed_attention(q, k, x["v"], group.window, group.head_dim**-0.5, starts), x, group)


def gla(x: Parts, own: dict[str, Tensor], group: Group, starts: Tensor | None) -> Tensor:
    """Gated linear attention."""
    q, k, v = linear_inputs(x, own, group, starts)
    mixed, _ = gated_linear_attention(q, k, v, log_gates(x, own, group), group.head_dim**-0.5, starts=starts)
    return gated(rms_norm(mixed, own["out_norm"], group.norm_eps), x, group)


def lightning(x: Parts, own: dict[str, Tensor], group: Group, starts: Tensor | None) -> Tensor:
    """Lightning attention: linear attention under a decay of each head's own."""
    q, k, v = linear_inputs(x, own, group, starts)
    mixed, _ = fixed_decay(q, k, v, lightning_log_decay(group.heads).to(q), group.head_dim**-0.5, starts=starts)
    return gated(rms_norm(mixed, own["out_norm"], group.norm_eps), x, group)


def gdn(x: Parts, own: dict[str, Tensor], group: Group, starts: Tensor | None) -> Tensor:
    """Gated DeltaNet: SiLU on q, k and v with or without a convolution before it, and q and k of length 1."""
    q, k, v = linear_inputs(x, own, group, starts)
    g, beta = gdn_gates(x["a"], x["b"], own["A_log"], own["dt_bias"], group.allow_neg_eigval)
    mixed, _ = gated_delta_rule(unit(q), unit(k), v, g, beta, group.head_dim**-0.5, starts=starts)
    return gated(rms_norm(mixed, own["out_norm"], group.norm_eps), x, group)


def kda(x: Parts, own: dict[str, Tensor], group: Group, starts: Tensor | None) -> Tensor:
    """Kimi Delta Attention: as gdn, with a gate of each channel, and gates through bottlenecks."""
    q, k, v = linear_inputs(x, own, group, starts)
    g = kda_gates(x["low"], own["gate_up"], own["A_log"], own["dt_bias"])
    beta = torch.sigmoid(x["b"]) * (2.0 if group.allow_neg_eigval else 1.0)
    mixed, _ = kimi_delta_rule(unit(q), unit(k), v, g, beta, group.head_dim**-0.5, starts=starts)
    if group.output_gate != "none":
        x = x | {"z": (x["low_z"] @ own["z_up"].T + own["z_bias"]).view_as(mixed)}
    return gated(rms_norm(mixed, own["out_norm"], group.norm_eps), x, group)


def mamba2(x: Parts, own: dict[str, Tensor], group: Group, starts: Tensor | None) -> Tensor:
    """Mamba2 of many heads: S_t = e^{-e^A dt_t} S_{t-1} + dt_t k_t^T v_t, o_t = q_t S_t + D v_t, dt = softplus(W_dt x + bias)."""
    q, k, v = linear_inputs(x, own, group, starts)
    dt = torch.log(1 + torch.exp(x["dt"] + own["dt_bias"]))
    mixed, _ = scalar_decay(q, dt[..., None] * k, v, -torch.exp(own["A_log"]) * dt, 1.0, starts=starts)
    mixed = mixed + torch.einsum("n,bsnd->bsnd", own["D"], v)
    return gated(rms_norm(mixed, own["out_norm"], group.norm_eps), x, group)


def rwkv7(x: Parts, own: dict[str, Tensor], group: Group, starts: Tensor | None) -> Tensor:
    """RWKV-7's time mixing, without the value residual; GroupNorm with eps d * norm_eps."""
    p = rwkv7_inputs(x, own, group, starts)
    removed = unit(p["k"] * by_head(own["k_k"], group))
    k = p["k"] * (1 + (p["rate"] - 1) * by_head(own["k_a"], group))
    mixed, _ = generalized_delta_rule(p["r"], k, p["v"], p["g"], -removed, removed * p["rate"], 1.0, starts=starts)
    deviation = torch.sqrt(mixed.var(-1, correction=0, keepdim=True) + group.head_dim * group.norm_eps)
    normal = (mixed - mixed.mean(-1, keepdim=True)) / deviation * by_head(own["out_norm_weight"], group)
    weight = torch.einsum("bsnd,bsnd,nd->bsn", p["r"], k, by_head(own["r_k"], group))
    return (normal + by_head(own["out_norm_bias"], group) + weight[..., None] * p["v"]) * p["gate"]


def rwkv7_inputs(x: Parts, own: dict[str, Tensor], group: Group, starts: Tensor | None) -> Parts:
    """r, k, v, log decay g, rate and output gate [b, s, n, d], each from a mix of its own of each token with the one before."""
    before = torch.zeros_like(x["x"])
    for t in range(1, before.shape[1]):
        begins = torch.zeros_like(before[:, 0, 0], dtype=torch.bool) if starts is None else starts[:, t]
        before[~begins, t] = x["x"][~begins, t - 1]
    mixed = dict(zip("rkvwag", (x["x"] + (before - x["x"]) * own["shift_mix"][:, None, None]).unbind(0)))
    r, k, v = (by_head(mixed[name] @ own[f"{name}_proj"].T, group) for name in "rkv")
    decay = torch.tanh(mixed["w"] @ own["decay_down"].T) @ own["decay_up"].T + own["decay_bias"]
    rate = mixed["a"] @ own["rate_down"].T @ own["rate_up"].T + own["rate_bias"]
    gate = torch.sigmoid(mixed["g"] @ own["gate_down"].T) @ own["gate_up"].T
    return {
        "r": positioned(r, group, starts), "k": positioned(k, group, starts), "v": v,
        "g": by_head(-torch.sigmoid(decay) / math.sqrt(math.e), group),
        "rate": by_head(torch.sigmoid(rate), group), "gate": by_head(gate, group),
    }  # fmt: skip


def by_head(x: Tensor, group: Group) -> Tensor:
    """[..., n d] -> [..., n, d]."""
    return x.unflatten(-1, (group.heads, group.head_dim))


MIXERS = {
    "attention": attention, "swa": swa, "gla": gla, "gdn": gdn, "kda": kda, "lightning": lightning, "mamba2": mamba2, "rwkv7": rwkv7,
}  # fmt: skip


def linear_inputs(x: Parts, own: dict[str, Tensor], group: Group, starts: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [b, s, n, d] as a linear mixer's recurrence takes them, each query head with a copy of its key and value."""
    found = {}
    for name in ("q", "k", "v"):
        part = x[name]
        if group.short_conv:
            part = short_convolution(part.flatten(2), own[f"conv_{name}"], starts).view_as(part)
        if group.short_conv or group.mixer in ("gdn", "kda"):
            part = silu(part)
        if name != "v":
            part = positioned(normalised(part, own, f"{name}_norm", group), group, starts if group.mixer in ("gla", "kda") else None)
        if name != "q":
            part = torch.stack([part[:, :, head // group.queries] for head in range(group.heads)], 2)
        found[name] = part
    return found["q"], found["k"], found["v"]


def normalised(x: Tensor, own: dict[str, Tensor], name: str, group: Group) -> Tensor:
    return rms_norm(x, own[name], group.norm_eps) if group.qk_norm else x


def positioned(x: Tensor, group: Group, starts: Tensor | None = None) -> Tensor:
    """RoPE, if the group has it, counting from the start of the sample or, where starts are given, of each document."""
    if group.rope_base is None or starts is None:
        return x if group.rope_base is None else rope(x, group.rope_base)
    rows = []
    for row, begins in zip(x, starts):
        cuts = [0, *(place for place in begins.nonzero()[:, 0].tolist() if place > 0), len(row)]
        rows.append(torch.cat([rope(row[None, first:end], group.rope_base)[0] for first, end in zip(cuts, cuts[1:])]))
    return torch.stack(rows)


def gated(o: Tensor, x: Parts, group: Group) -> Tensor:
    """o [b, s, n, d], times the output gate."""
    return o if group.output_gate == "none" else o * {"silu": silu, "sigmoid": torch.sigmoid}[group.output_gate](x["z"])


def log_gates(x: Parts, own: dict[str, Tensor], group: Group) -> Tensor:
    """What a group's states decay by at each token: gla, kda and rwkv7 [b, s, n, d], gdn, lightning and mamba2 [b, s, n]."""
    if group.mixer == "rwkv7":
        return rwkv7_inputs(x, own, group, None)["g"]
    if group.mixer == "gla":
        return gla_gates(x["low"], own["gate_up"], own["gate_bias"], group.gate_temperature).view(*x["q"].shape)
    if group.mixer == "gdn":
        return gdn_gates(x["a"], x["b"], own["A_log"], own["dt_bias"], False)[0]
    if group.mixer == "kda":
        return kda_gates(x["low"], own["gate_up"], own["A_log"], own["dt_bias"])
    if group.mixer == "mamba2":
        return -torch.exp(own["A_log"]) * torch.log(1 + torch.exp(x["dt"] + own["dt_bias"]))
    return lightning_log_decay(group.heads).to(x["q"]).expand(x["q"].shape[:3])


def mixing_layer(weights: dict[str, Tensor], hidden: Tensor, groups: list[Group], starts: Tensor | None = None) -> Tensor:
    """A whole layer, hidden [b, s, h] to [b, s, h], layer-wise (one group) or head-wise; `weights` by their names in the layer."""
    projected = layer_parts(weights, hidden, groups)
    heads = [MIXERS[group.mixer](projected[i], own_weights(weights, i), group, starts) for i, group in enumerate(groups)]
    output, column = torch.zeros_like(hidden), 0
    for i, place in units_in_order(groups):
        queries = groups[i].queries
        mixed = heads[i][:, :, place * queries : (place + 1) * queries].flatten(2)
        output = output + mixed @ weights["out_proj.weight"][:, column : column + mixed.shape[-1]].T
        column += mixed.shape[-1]
    assert column == weights["out_proj.weight"].shape[1]
    return output


def layer_parts(weights: dict[str, Tensor], hidden: Tensor, groups: list[Group]) -> list[Parts]:
    """Each group's projected rows."""
    rows: list[dict[str, list[Tensor]]] = [{name: [] for name, _ in group.unit_rows()} for group in groups]
    row = 0
    for i, _ in units_in_order(groups):
        for name, width in groups[i].unit_rows():
            rows[i][name].append(weights["in_proj.weight"][row : row + width])
            row += width
    assert row == (weights["in_proj.weight"].shape[0] if "in_proj.weight" in weights else 0)
    found, shared_row = [], 0
    for group, own_rows in zip(groups, rows):
        if group.mixer == "rwkv7":
            found.append({"x": hidden})
            continue
        x = {name: hidden @ torch.cat(pieces).T for name, pieces in own_rows.items()}
        x = {name: part if name in ("a", "b", "dt") else part.unflatten(-1, (-1, group.head_dim)) for name, part in x.items()}
        for name, width in group.shared_rows():
            x[name] = hidden @ weights["shared_proj.weight"][shared_row : shared_row + width].T
            shared_row += width
        found.append(x)
    assert shared_row == (weights["shared_proj.weight"].shape[0] if "shared_proj.weight" in weights else 0)
    return found


def units_in_order(groups: list[Group]) -> list[tuple[int, int]]:
    """(group, unit of that group) in the order of rows and columns: layer unit by layer unit, in each one group by group."""
    layer_units = math.gcd(*(group.kv_heads for group in groups))
    order = []
    for layer_unit in range(layer_units):
        for i, group in enumerate(groups):
            each = group.kv_heads // layer_units
            order += [(i, layer_unit * each + j) for j in range(each)]
    return order


def own_weights(weights: dict[str, Tensor], i: int) -> dict[str, Tensor]:
    """Parameters of group i."""
    return {name.removeprefix(f"mixers.{i}."): w for name, w in weights.items() if name.startswith(f"mixers.{i}.")}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||, in float64."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))
