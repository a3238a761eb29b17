"""The token mixers by the names recipes use."""

from hybrid_megatron.model.mixers.attention import Attention
from hybrid_megatron.model.mixers.base import Mixer
from hybrid_megatron.model.mixers.gdn import GDN

MIXERS: dict[str, type[Mixer]] = {"attention": Attention, "gdn": GDN}

__all__ = ["MIXERS", "Mixer"]
