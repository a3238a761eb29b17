"""What the linear mixers' recurrences have in common, so that context parallelism and sliding windows are written once for all of them.

Each is affine in its state: S_t = F_t(S_{t-1}) + (what token t adds), and o_t = scale * q_t S_t, per head, with row vectors q_t [K] and
S [K, V]. A document start resets the state to zero before its first token.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

KERNEL_CHUNK = 64
"""Tokens that FLA's kernels of these recurrences take at once."""


class Recurrence(ABC):
    """The recurrence of one layer's heads. `inputs` are tensors [b, s, n, ...] in the order of `input_names`; document_starts [b, s] bool.

    States [b, n, K, V] and gates are float32 (float64 if the rest is); outputs [b, s, n, V] have v's dtype.
    """

    input_names: tuple[str, ...]
    """q, k, v first, then gates."""
    constant_transition = False
    """Whether all spans of one length have the same transition, but for document starts."""
    states_by_kernels = False
    """Whether `summary` and `initial_state_gradient` are passes over states alone on CUDA, at a fraction of the recurrence's own time."""

    @abstractmethod
    def run(
        self, inputs: tuple[Tensor, ...], *, scale: float, initial_state: Tensor | None = None, document_starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(o, final state) in the fast form for the device the inputs are on: FLA's kernels on CUDA, chunks in torch elsewhere."""

    @abstractmethod
    def recurrent(
        self, inputs: tuple[Tensor, ...], *, scale: float, initial_state: Tensor | None = None, document_starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(o, final state) by the definition, one token after the other; differentiable, in the one dtype of all inputs."""

    @abstractmethod
    def summary(self, inputs: tuple[Tensor, ...], document_starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(transition, added) of these tokens: they turn a state S into apply(transition, S, added).

        added [b, n, K, V]; transition [b, n, ...] as `apply` takes it, zero where a document starts inside. float32 or wider, without
        gradients.
        """

    def initial_state_gradient(
        self, inputs: tuple[Tensor, ...], grad: Tensor, *, scale: float, document_starts: Tensor | None = None
    ) -> Tensor:
        """[b, n, K, V] of the state that `run` starts from, given the gradient of its output, grad [b, s, n, V]. It does not depend on
        that state."""
        inputs = tuple(x.detach() for x in inputs)
        _, k, v = inputs[:3]
        wide = torch.promote_types(k.dtype, torch.float32)
        state = k.new_zeros(k.shape[0], *k.shape[2:], v.shape[-1], dtype=wide).requires_grad_()
        with torch.enable_grad():
            o, _ = self.run(inputs, scale=scale, initial_state=state, document_starts=document_starts)
        return torch.autograd.grad(o, state, grad)[0]

    def apply(self, transition: Tensor, state: Tensor, added: Tensor | None = None) -> Tensor:
        """The state [..., n, K, V] after the tokens whose summary is given; without `added` what is left of the one before."""
        return transition * state if added is None else torch.addcmul(added, transition, state)

    def apply_back(self, transition: Tensor, grad: Tensor, own: Tensor) -> Tensor:
        """The gradient of the state before the tokens, from that of the state after them and, `own`, that by the tokens' outputs, all
        [..., n, K, V]."""
        return torch.addcmul(own, transition, grad)

    def for_heads(self, heads: slice) -> "Recurrence":
        """The same recurrence for some of its heads."""
        return self


class MatrixTransition(Recurrence):
    """One whose transitions are matrices [b, n, K, K] that multiply the state from the left."""

    @torch.no_grad()
    def summary(self, inputs, document_starts=None):
        """By the recurrence itself: with values [v | 0] and the initial state [0 | I], its final state is [added | transition]."""
        q, k, v, *more = inputs
        wide = torch.promote_types(k.dtype, torch.float32)
        width_k, width_v = k.shape[-1], v.shape[-1]
        identity = torch.eye(width_k, dtype=wide, device=k.device).expand(k.shape[0], k.shape[2], width_k, width_k)
        start = torch.cat((identity.new_zeros(*identity.shape[:3], width_v), identity), dim=-1)
        padded = torch.cat((v, v.new_zeros(*v.shape[:-1], width_k)), dim=-1)
        _, final = self.run((q, k, padded, *more), scale=1.0, initial_state=start, document_starts=document_starts)
        added, transition = final.split((width_v, width_k), dim=-1)
        return transition, added

    def apply(self, transition: Tensor, state: Tensor, added: Tensor | None = None) -> Tensor:
        return transition @ state if added is None else _added_matmul(added, transition, state)

    def apply_back(self, transition: Tensor, grad: Tensor, own: Tensor) -> Tensor:
        return _added_matmul(own, transition.mT, grad)


def _added_matmul(added: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """added + a @ b of matrices [..., K, V], as one operation."""
    return torch.baddbmm(*(x.flatten(0, -3) for x in (added, a, b))).view(added.shape)
