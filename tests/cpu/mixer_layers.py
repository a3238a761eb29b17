"""Layers of the tests of mixers: each mixer alone, with its options, and beside others, as entries of a pattern."""

HEADS = 8
NOPE, ROPE = {"mixer": "attention", "position": "nope"}, {"mixer": "attention", "position": "rope"}
GDN, GLA, KDA, SWA, LIGHTNING, MAMBA2, RWKV7 = ({"mixer": name} for name in ("gdn", "gla", "kda", "swa", "lightning", "mamba2", "rwkv7"))
LINEAR = ("gla", "gdn", "kda", "lightning", "mamba2", "rwkv7")


def mix(*groups: tuple[dict, int]) -> dict:
    """An entry of a pattern whose heads are shared out."""
    return {"heads": [entry | {"share": share} for entry, share in groups]}


# name: (entry of the pattern, further settings of `model`)
PLAIN = {
    "attention, rope": (ROPE, []),
    "attention, nope": (NOPE, []),
    "swa": (SWA, ["swa.window=16"]),
    "gla": (GLA, []),
    "gdn": (GDN, []),
    "kda": (KDA, []),
    "lightning": (LIGHTNING, []),
    "mamba2": (MAMBA2, []),
    "rwkv7": (RWKV7, []),
}
OPTIONS = {
    "attention, rope of another base": (ROPE, ["attention.rope_base=100"]),
    "attention, grouped queries": (ROPE, ["num_kv_heads=2"]),
    "attention, one key-value head": (NOPE, ["num_kv_heads=1"]),
    "attention, QK norm": (NOPE, ["attention.qk_norm=true"]),
    "attention, sigmoid gate": (ROPE, ["attention.output_gate=sigmoid"]),
    "attention, SiLU gate": (NOPE, ["attention.output_gate=silu"]),
    "attention, all together": (ROPE, ["num_kv_heads=4", "attention.qk_norm=true", "attention.output_gate=silu", "attention.rope_base=50"]),
    "swa, nope": (SWA | {"position": "nope"}, ["swa.window=16"]),
    "swa, a window of one": (SWA, ["swa.window=1"]),
    "swa, a window wider than the sample": (SWA, ["swa.window=200"]),
    "swa, rope of another base": (SWA, ["swa.window=20", "swa.rope_base=100"]),
    "swa, grouped queries": (SWA, ["swa.window=33", "num_kv_heads=2"]),
    "swa, QK norm": (SWA, ["swa.window=7", "swa.qk_norm=true"]),
    "swa, sigmoid gate": (SWA, ["swa.window=7", "swa.output_gate=sigmoid"]),
    "swa, SiLU gate": (SWA, ["swa.window=7", "swa.output_gate=silu"]),
    "swa, all together": (SWA, ["num_kv_heads=4", "swa.window=9", "swa.qk_norm=true", "swa.output_gate=sigmoid", "swa.rope_base=50"]),
    "gla, rope": (GLA | {"position": "rope"}, []),
    "gla, rope of another base": (GLA | {"position": "rope"}, ["gla.rope_base=100"]),
    "gla, QK norm": (GLA, ["gla.qk_norm=true"]),
    "gla, sigmoid gate": (GLA, ["gla.output_gate=sigmoid"]),
    "gla, no output gate": (GLA, ["gla.output_gate=none"]),
    "gla, convolution": (GLA, ["gla.short_conv=4"]),
    "gla, shared keys": (GLA, ["gla.num_kv_heads=2"]),
    "gla, rank and temperature": (GLA, ["gla.gate_rank=3", "gla.gate_temperature=2"]),
    "gla, all together": (
        GLA | {"position": "rope"},
        ["gla.qk_norm=true", "gla.output_gate=sigmoid", "gla.short_conv=3", "gla.num_kv_heads=4", "gla.gate_rank=5"],
    ),
    "gdn, negative eigenvalues": (GDN, ["gdn.allow_neg_eigval=true"]),
    "gdn, rope": (GDN | {"position": "rope"}, []),
    "gdn, rope of another base": (GDN | {"position": "rope"}, ["gdn.rope_base=100"]),
    "gdn, QK norm": (GDN, ["gdn.qk_norm=true"]),
    "gdn, sigmoid gate": (GDN, ["gdn.output_gate=sigmoid"]),
    "gdn, no output gate": (GDN, ["gdn.output_gate=none"]),
    "gdn, convolution": (GDN, ["gdn.short_conv=4"]),
    "gdn, shared keys": (GDN, ["gdn.num_kv_heads=2"]),
    "gdn, all together": (
        GDN | {"position": "rope"},
        ["gdn.qk_norm=true", "gdn.output_gate=sigmoid", "gdn.short_conv=3", "gdn.num_kv_heads=4", "gdn.allow_neg_eigval=true"],
    ),
    "kda, rope": (KDA | {"position": "rope"}, []),
    "kda, SiLU gate": (KDA, ["kda.output_gate=silu"]),
    "kda, no output gate": (KDA, ["kda.output_gate=none"]),
    "kda, convolution": (KDA, ["kda.short_conv=4"]),
    "kda, shared keys": (KDA, ["kda.num_kv_heads=2"]),
    "kda, all together": (
        KDA | {"position": "rope"},
        ["kda.qk_norm=true", "kda.rope_base=100", "kda.short_conv=3", "kda.num_kv_heads=4", "kda.allow_neg_eigval=true"],
    ),
    "lightning, nope": (LIGHTNING | {"position": "nope"}, []),
    "lightning, rope of another base": (LIGHTNING, ["lightning.rope_base=100"]),
    "lightning, no QK norm": (LIGHTNING, ["lightning.qk_norm=false"]),
    "lightning, SiLU gate": (LIGHTNING, ["lightning.output_gate=silu"]),
    "lightning, no output gate": (LIGHTNING, ["lightning.output_gate=none"]),
    "lightning, convolution": (LIGHTNING, ["lightning.short_conv=4"]),
    "lightning, shared keys": (LIGHTNING, ["lightning.num_kv_heads=1"]),
    "rwkv7, rope": (RWKV7 | {"position": "rope"}, ["rwkv7.rope_base=100"]),
    "rwkv7, ranks": (RWKV7, ["rwkv7.decay_rank=3", "rwkv7.rate_rank=5", "rwkv7.gate_rank=40"]),
    "lightning, all together": (LIGHTNING, ["lightning.output_gate=silu", "lightning.short_conv=2", "lightning.num_kv_heads=4"]),
    "mamba2, rope": (MAMBA2 | {"position": "rope"}, []),
    "mamba2, no output gate": (MAMBA2, ["mamba2.output_gate=none"]),
    "mamba2, convolution": (MAMBA2, ["mamba2.short_conv=4"]),
    "mamba2, shared keys": (MAMBA2, ["mamba2.num_kv_heads=2"]),
    "mamba2, all together": (
        MAMBA2 | {"position": "rope"},
        ["mamba2.qk_norm=true", "mamba2.output_gate=sigmoid", "mamba2.short_conv=3", "mamba2.num_kv_heads=4", "mamba2.rope_base=100"],
    ),
}
MIXES = {
    "gdn 3 : attention 1": (mix((GDN, 3), (NOPE, 1)), []),
    "attention 1 : gdn 3": (mix((NOPE, 1), (GDN, 3)), []),
    "gla 3 : attention 1": (mix((GLA, 3), (ROPE, 1)), []),
    "swa 1 : attention 1": (mix((SWA, 1), (NOPE, 1)), ["swa.window=16"]),
    "lightning 1 : attention 3": (mix((LIGHTNING, 1), (NOPE, 3)), []),
    "gdn 5 : attention 3": (mix((GDN, 5), (NOPE, 3)), []),
    "gdn 2 : swa 1 : attention 1": (mix((GDN, 2), (SWA, 1), (NOPE, 1)), ["swa.window=16"]),
    "rwkv7 3 : attention 1": (mix((RWKV7, 3), (NOPE, 1)), []),
    "gla 1 : rwkv7 1": (mix((GLA, 1), (RWKV7 | {"position": "rope"}, 1)), []),
    "attention rope 3 : nope 1": (mix((ROPE, 3), (NOPE, 1)), []),
    "gla nope 1 : gla rope 1": (mix((GLA, 1), (GLA | {"position": "rope"}, 1)), []),
    "grouped queries beside heads of their own": (mix((GDN, 1), (NOPE, 1)), ["num_kv_heads=4"]),
    "grouped queries of two kinds": (mix((LIGHTNING, 1), (ROPE, 1)), ["num_kv_heads=4", "lightning.num_kv_heads=2"]),
    "all mixers, all options": (
        mix((GLA, 2), (GDN, 2), (LIGHTNING, 2), (SWA, 1), (NOPE, 1)),
        ["gla.short_conv=3", "gla.output_gate=sigmoid", "gdn.short_conv=4", "gdn.qk_norm=true", "lightning.num_kv_heads=4"]
        + ["swa.window=9", "swa.output_gate=silu", "attention.qk_norm=true", "attention.output_gate=sigmoid"],
    ),
    "kda 2 : gla 1 : mamba2 1": (mix((KDA, 2), (GLA, 1), (MAMBA2, 1)), ["kda.short_conv=3", "gla.gate_rank=5"]),
    "kda of two kinds": (mix((KDA, 1), (KDA | {"position": "rope"}, 1)), ["kda.num_kv_heads=4"]),
}  # fmt: skip
LAYERS = PLAIN | OPTIONS | MIXES
# Two borders of chunks of 64 and a last chunk that is not full; options and mixes, which change nothing in the chunks, have one border.
LENGTHS = {name: 150 if name in PLAIN else 70 for name in LAYERS}
