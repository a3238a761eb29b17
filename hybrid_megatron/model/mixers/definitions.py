"""What several mixers' definitions share: norms, gates and rotary positions by their formulas, for one process, in the dtype given."""

import torch
from torch import Tensor

from hybrid_megatron.config.schema import LinearConfig, ModelConfig, SoftmaxConfig


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def gate(x: Tensor, kind: str) -> Tensor:
    """sigmoid(x), or silu: x sigmoid(x)."""
    open_ = 1 / (1 + (-x).exp())
    return x * open_ if kind == "silu" else open_


def rotate(x: Tensor, base: float, document_starts: Tensor | None) -> Tensor:
    """RoPE of x [b, s, n, d]: complex multiplication of the pairs (i, i + d/2) by e^{i position base^(-2i/d)}, positions from the start of
    the sample, or of each document if their starts are given."""
    length, width = x.shape[1], x.shape[-1]
    position = torch.arange(length, device=x.device).expand(x.shape[0], length)
    if document_starts is not None:
        position = torch.stack([p - torch.where(row, p, 0).cummax(0).values for p, row in zip(position, document_starts)])
    angle = position[..., None] * base ** (-torch.arange(0, width, 2, device=x.device, dtype=torch.float64) / width)
    pairs = torch.complex(x[..., : width // 2], x[..., width // 2 :])
    turned = pairs * torch.polar(torch.ones_like(angle), angle).to(pairs.dtype)[:, :, None]
    return torch.cat((turned.real, turned.imag), -1)


def visible(length: int, window: int | None, document_starts: Tensor | None, device: torch.device) -> Tensor:
    """[1 or b, s, s] bool: whether query (row) sees key (column)."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None]
    seen = (distance >= 0)[None] if window is None else ((distance >= 0) & (distance < window))[None]
    if document_starts is None:
        return seen
    document = document_starts.long().cumsum(1)
    return seen & (document[:, :, None] == document[:, None, :])


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """q [b, s, n, d] over k, v [b, s, n, d] where `seen` [b, s, s]; scale d^-1/2."""
    logits = torch.einsum("bsnd,btnd->bnst", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bnst,btnd->bsnd", logits.masked_fill(~seen[:, None], float("-inf")).softmax(-1), v)


def convolve(x: Tensor, weight: Tensor, document_starts: Tensor | None) -> Tensor:
    """Causal convolution of each channel of x [b, s, c] by weight [c, width], whose last tap is the token itself, within documents."""
    length, width = x.shape[1], weight.shape[1]
    near = visible(length, width, document_starts, x.device).to(x.dtype)
    position = torch.arange(length, device=x.device)
    tap = (width - 1 - (position[:, None] - position[None])).clamp(0, width - 1)
    return torch.einsum("bst,stc,btc->bsc", near.expand(x.shape[0], -1, -1), weight.T[tap], x)


def rows_of_heads(x: Tensor, width: int) -> Tensor:
    """[b, s, units, heads of a unit * width] -> [b, s, heads, width]."""
    return x.unflatten(-1, (-1, width)).flatten(2, 3)


def normalised_and_turned(
    q: Tensor,
    k: Tensor,
    weights: dict[str, Tensor],
    settings: SoftmaxConfig | LinearConfig,
    model: ModelConfig,
    position: str,
    document_starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """QK norm and RoPE, where the settings and the position ask for them."""
    if settings.qk_norm:
        q, k = rms_norm(q, weights["q_norm"], model.norm_eps), rms_norm(k, weights["k_norm"], model.norm_eps)
    if position == "rope":
        q, k = rotate(q, settings.rope_base, document_starts), rotate(k, settings.rope_base, document_starts)
    return q, k
