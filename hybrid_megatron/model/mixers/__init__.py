"""The token mixers by the names recipes use."""

from hybrid_megatron.model.mixers.attention import Attention
from hybrid_megatron.model.mixers.base import Mixer
from hybrid_megatron.model.mixers.gdn import GDN
from hybrid_megatron.model.mixers.gla import GLA
from hybrid_megatron.model.mixers.kda import KDA
from hybrid_megatron.model.mixers.lightning import Lightning
from hybrid_megatron.model.mixers.mamba2 import Mamba2
from hybrid_megatron.model.mixers.rwkv7 import RWKV7
from hybrid_megatron.model.mixers.swa import SWA

MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "swa": SWA,
    "gla": GLA,
    "gdn": GDN,
    "kda": KDA,
    "lightning": Lightning,
    "mamba2": Mamba2,
    "rwkv7": RWKV7,
}

__all__ = ["MIXERS", "Mixer"]
