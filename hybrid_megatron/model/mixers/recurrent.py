"""What every mixer with a recurrence shares: how its states pass over context ranks, and its sliding window at inference."""

from torch import Tensor

from hybrid_megatron.config.schema import ModelConfig, ParallelConfig
from hybrid_megatron.model.head_group import HeadGroup
from hybrid_megatron.model.mixers.base import Mixer, all_to_all_problems
from hybrid_megatron.ops.head_exchange import recurrence_over_heads
from hybrid_megatron.ops.recurrence import Recurrence
from hybrid_megatron.ops.state_passing import recurrence_over_ranks
from hybrid_megatron.ops.swla import SlidingWindow
from hybrid_megatron.parallel import SequenceLayout


class RecurrentMixer(Mixer):
    """Each head has a state, which context ranks pass on by summaries of their tokens, or keep where all tokens of the head are."""

    needs_fla = True
    widest_head: int | None = None
    """The head_dim up to which there are kernels; None: whatever fits."""

    @classmethod
    def check(cls, model: ModelConfig, group: HeadGroup, parallel: ParallelConfig, context: int) -> list[str]:
        problems, window = super().check(model, group, parallel, context), group.inference.swla_window
        if cls.widest_head is not None and model.head_dim > cls.widest_head:
            problems.append(
                f"model.head_dim={model.head_dim}: flash-linear-attention's kernels of {group.mixer} take heads of up to {cls.widest_head} "
                "channels; take more heads that are narrower"
            )
        if parallel.context > 1 and parallel.context_linear == "all_to_all":
            problems += all_to_all_problems("context_linear", str(group), group.heads, parallel, "states")
        elif parallel.context > 1 and window is not None:
            problems.append(
                f"inference.swla_window={window}: under parallel.context={parallel.context} it needs whole sequences on a rank; "
                "set parallel.context_linear=all_to_all or parallel.context=1"
            )
        return problems

    def _recur(self, recurrence: Recurrence, inputs: tuple[Tensor, ...], scale: float, layout: SequenceLayout) -> Tensor:
        """The recurrence's output [b, s, n, d] at this rank's tokens, from inputs of the local heads at these tokens."""
        inference = self.group.inference
        if inference.swla_window is not None:
            recurrence = SlidingWindow(recurrence, inference.swla_window, inference.swla_stride)
        if layout.size > 1 and self.parallel.context_linear == "all_to_all":
            return recurrence_over_heads(recurrence, inputs, scale, layout, self.ranks.cp)
        return recurrence_over_ranks(recurrence, inputs, scale, layout, self.ranks.cp)
