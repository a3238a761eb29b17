"""Process groups, the place of this process among them, and how a sequence is cut over context ranks."""

from hybrid_megatron.parallel.sequence_layout import SequenceLayout
from hybrid_megatron.parallel.state import ParallelState, start

__all__ = ["ParallelState", "SequenceLayout", "start"]
