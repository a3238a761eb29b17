"""Models of every mixer, layer-wise and head-wise, for the parity tests: overrides on the tiny recipe.

Eight heads of 8 channels; windows of 20 of the 64 tokens, so that they reach over chunks of 8 and 16 under context parallelism.
"""

_SIZES = ["model.num_heads=8", "model.num_kv_heads=8", "model.swa.window=20"]


def _layers(*entries: str) -> list[str]:
    return [*_SIZES, f"pattern=[{', '.join('{' + entry + '}' for entry in entries)}]"]


def _layer_wise(mixer: str) -> list[str]:
    return _layers(f"mixer: {mixer}, repeat: 3", "mixer: attention, position: nope")


def _head_wise(mixer: str) -> list[str]:
    return _layers(f"heads: [{{mixer: {mixer}, share: 3}}, {{mixer: attention, position: nope}}]")


MATRIX = {
    "attention rope, LH": _layers("mixer: attention, position: rope"),
    "attention nope, LH": _layers("mixer: attention, position: nope"),
    "swa, LH": _layer_wise("swa"),
    "gla, LH": _layer_wise("gla"),
    "gdn, LH": _layer_wise("gdn"),
    "kda, LH": _layer_wise("kda"),
    "lightning, LH": _layer_wise("lightning"),
    "mamba2, LH": _layer_wise("mamba2"),
    "rwkv7, LH": _layer_wise("rwkv7"),
    "attention rope + nope, HH": _head_wise("attention, position: rope"),
    "swa + nope, HH": _head_wise("swa"),
    "gla + nope, HH": _head_wise("gla"),
    "gdn + nope, HH": _head_wise("gdn"),
    "kda + nope, HH": _head_wise("kda"),
    "lightning + nope, HH": _head_wise("lightning"),
    "mamba2 + nope, HH": _head_wise("mamba2"),
    "rwkv7 + nope, HH": _head_wise("rwkv7"),
}
"""One mixer each, beside attention without position at 3:1."""

MIXED = {
    "all mixers, LH": _layers("mixer: swa", "mixer: gla", "mixer: lightning", "mixer: attention, position: nope"),
    "all mixers, HH": _layers(
        "heads: [{mixer: gdn, share: 3}, {mixer: attention, position: nope}]",
        "heads: [{mixer: swa}, {mixer: attention, position: nope}]",
        "heads: [{mixer: gla, share: 2}, {mixer: attention, position: rope}, {mixer: gdn, position: rope}]",
        "heads: [{mixer: lightning}, {mixer: rwkv7, share: 2}, {mixer: attention, position: nope}]",
    ),
    "all options, HH": [
        *_layers(
            "heads: [{mixer: gdn}, {mixer: mamba2, position: rope}, {mixer: attention, position: nope, share: 2}]",
            "heads: [{mixer: swa}, {mixer: gla, position: rope}]",
            "heads: [{mixer: kda, position: rope}, {mixer: lightning}]",
            "heads: [{mixer: gla}, {mixer: attention, position: rope}]",
        ),
        "model.num_kv_heads=4",
        "model.attention={qk_norm: true, output_gate: sigmoid}",
        "model.swa={qk_norm: true, output_gate: silu, rope_base: 500}",
        "model.gdn={short_conv: 4, qk_norm: true, allow_neg_eigval: true}",
        "model.gla={short_conv: 3, num_kv_heads: 4, output_gate: sigmoid}",
        "model.kda={short_conv: 2, qk_norm: true, num_kv_heads: 4, allow_neg_eigval: true}",
        "model.lightning={short_conv: 2, output_gate: none}",
        "model.mamba2={short_conv: 3, qk_norm: true, output_gate: sigmoid}",
    ],
}
"""Many of them in one model, all options in the last: what the default tests cover."""
