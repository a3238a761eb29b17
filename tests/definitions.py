"""The mixers by their formulas, written from the mathematics alone and slow on purpose: what the tests compare with.

Nothing here imports the code under test. Row vectors, per head; `S` is [d_k, d_v]; log gates g <= 0. Everything works in the dtype and
on the device of its arguments, and is differentiable.
"""

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


def gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    norm_eps: float,
    allow_neg_eigval: bool,
    starts: Tensor | None,
) -> Tensor:
    """Gated DeltaNet between its projections: q, k, v, z [b, s, n, d] and a, b [b, s, n] to [b, s, n, d]."""
    q, k, v = silu(q), silu(k), silu(v)
    g, beta = gdn_gates(a, b, A_log, dt_bias, allow_neg_eigval)
    mixed, _ = gated_delta_rule(unit(q), unit(k), v, g, beta, q.shape[-1] ** -0.5, starts=starts)
    return rms_norm(mixed, norm, norm_eps) * silu(z)


def attention(q: Tensor, k: Tensor, v: Tensor, *, base: float | None, starts: Tensor | None) -> Tensor:
    """Softmax attention between its projections; `base` is RoPE's, None carries no position."""
    if base is not None:
        q, k = rope(q, base), rope(k, base)
    return causal_attention(q, k, v, q.shape[-1] ** -0.5, starts)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||, in float64."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))
