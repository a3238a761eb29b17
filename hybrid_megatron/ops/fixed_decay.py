"""Linear attention with a fixed decay a head, the recurrence of Lightning attention (Qin et al., 2024, arXiv 2401.04658, equation 9):

    S_t = gamma_h S_{t-1} + k_t^T v_t        o_t = scale * q_t S_t

per head h, with row vectors q_t, k_t [K], v_t [V], state S [K, V] and 0 < gamma_h <= 1.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_megatron.ops import decay
from hybrid_megatron.ops.chunks import cut, join, visible
from hybrid_megatron.ops.documents import over_documents
from hybrid_megatron.ops.recurrence import Recurrence

CHUNK = 64


def lightning_log_decay(heads: int) -> Tensor:
    """ln gamma_h = -2^(-8 h / H), h = 1 .. H [H] float64, of a layer's H heads over all ranks (HypeNet, equation 19)."""
    return -torch.exp2(-8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)


class FixedDecay(Recurrence):
    """Inputs q, k [b, s, n, K], v [b, s, n, V]; transitions [b, n, 1, 1].

    log_decay [n] is ln gamma of the heads at hand, float32 or float64, on the inputs' device; it gets no gradient. On CUDA it must not be
    below -1.4 (Lightning's never is below -1): in a last chunk that is not full, FLA's kernels multiply zeros by up to e^(-63 ln gamma).
    """

    input_names = ("q", "k", "v")
    constant_transition = True
    states_by_kernels = True

    def __init__(self, log_decay: Tensor):
        assert log_decay.dtype in (torch.float32, torch.float64), f"decays in {log_decay.dtype}"
        self.log_decay = log_decay.detach()

    def for_heads(self, heads: slice) -> "FixedDecay":
        return FixedDecay(self.log_decay[heads])

    def run(self, inputs, *, scale, initial_state=None, document_starts=None):
        if not inputs[0].is_cuda:
            return self.chunked(*inputs, scale=scale, initial_state=initial_state, document_starts=document_starts)
        from fla.ops.simple_gla import chunk_simple_gla

        kernel = partial(chunk_simple_gla, g_gamma=self.log_decay.float(), scale=scale, output_final_state=True)
        return over_documents(kernel, inputs, initial_state, document_starts)

    def recurrent(self, inputs, *, scale, initial_state=None, document_starts=None):
        q, k, v = inputs
        g = self.log_decay.to(k.dtype)[:, None].expand(*k.shape[:3], 1)
        return decay.recurrent(q, k, v, g, scale=scale, initial_state=initial_state, document_starts=document_starts)

    def chunked(self, q, k, v, *, scale: float, initial_state=None, document_starts=None) -> tuple[Tensor, Tensor]:
        """(o, final state) in chunks of tokens, for the CPU; float32 for lower precisions, the given dtype otherwise."""
        work = torch.promote_types(q.dtype, torch.float32)
        length, out_dtype = q.shape[1], v.dtype
        # Tokens of the chunk up to each place: padding after the last token does not count, so the final state decays no further.
        tokens = cut(torch.ones(1, length, 1, device=q.device), CHUNK, work).cumsum(-1)
        q, k, v = (cut(x, CHUNK, work) for x in (q, k, v))
        q = q * scale
        steps = tokens[..., :, None] - F.pad(tokens, (1, 0))[..., None, :]
        powers = self.log_decay.to(work)[:, None, None, None] * steps
        decays = powers.masked_fill(~visible(document_starts, CHUNK, q.device), float("-inf")).exp()

        scores = decays[..., 1:] * (q @ k.mT)
        o, final = decay.through_chunks(q, k, v, scores, decays[..., None], initial_state)
        return join(o, length).to(out_dtype), final

    @torch.no_grad()
    def summary(self, inputs, document_starts=None):
        _, k, v = inputs
        batch, length = k.shape[:2]
        log_decay = self.log_decay.to(torch.promote_types(k.dtype, torch.float32))
        transition = decay.cut_by_documents((length * log_decay).exp()[:, None, None].expand(batch, -1, 1, 1), document_starts)
        if k.is_cuda:
            from hybrid_megatron.ops import state_kernels

            return transition, state_kernels.decayed_sum(k, v, document_starts, g_gamma=log_decay)
        after = torch.arange(length - 1, -1, -1, device=k.device)[:, None] * log_decay
        return transition, decay.decayed_sum(k, v, after[None, ..., None], document_starts)

    def initial_state_gradient(self, inputs, grad, *, scale, document_starts=None):
        if not grad.is_cuda:
            return super().initial_state_gradient(inputs, grad, scale=scale, document_starts=document_starts)
        from hybrid_megatron.ops import state_kernels

        return state_kernels.gradient_under_decay(inputs[0], grad, scale, document_starts, g_gamma=self.log_decay.float())
