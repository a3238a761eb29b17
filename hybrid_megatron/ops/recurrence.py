"""What the linear mixers' recurrences have in common, so that context parallelism and sliding windows are written once for all of them.

Each is affine in its state: S_t = F_t(S_{t-1}) + (what token t adds), and o_t = scale * q_t S_t, per head, with row vectors q_t [K] and
S [K, V]. A document start resets the state to zero before its first token.
"""

from abc import ABC, abstractmethod

from torch import Tensor


class Recurrence(ABC):
    """The recurrence of one layer's heads. `inputs` are tensors [b, s, n, ...] in the order of `input_names`; document_starts [b, s] bool.

    States [b, n, K, V] and gates are float32 (float64 if the rest is); outputs [b, s, n, V] have v's dtype.
    """

    input_names: tuple[str, ...]
    """q, k, v first, then gates."""
    constant_transition = False
    """Whether all spans of one length have the same transition, but for document starts."""

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
        """(transition, added) of these tokens: they turn a state S into apply(transition, S) + added.

        added [b, n, K, V]; transition [b, n, ...] as `apply` takes it, zero where a document starts inside. float32 or wider,
        differentiable.
        """

    def apply(self, transition: Tensor, state: Tensor) -> Tensor:
        """The state [..., n, K, V] after the tokens whose transition is given, without what they add."""
        return transition * state

    def for_heads(self, heads: slice) -> "Recurrence":
        """The same recurrence for some of its heads."""
        return self
