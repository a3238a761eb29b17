"""Settings of inference alone -> the layer plan: which heads compute otherwise than in training, on longer inputs.

They need no other checkpoint, since none of them has parameters. Each acts on the heads it is meant for, layer-wise or head-wise:

    logit_scale     attention without position    log, hype or constant (model/attention/logit_scale.py)
    dynamic_ntk     attention with RoPE           its base grows with the input
    rope_window     attention with RoPE           sees a window only (SWA-4k)
    swla_window     linear mixers                 the recurrence sees a window only, in strides (ops/swla.py)
"""

import math
from dataclasses import replace

from hybrid_megatron.config.schema import InferenceConfig
from hybrid_megatron.config.setting_types import as_written
from hybrid_megatron.errors import ConfigError
from hybrid_megatron.model.head_group import HeadGroup, Inference
from hybrid_megatron.model.mixers import MIXERS
from hybrid_megatron.model.pattern import LayerPlan

LOGIT_SCALES = ("none", "log", "hype", "constant")
_LINEAR = " or ".join(", ".join(name for name, mixer in MIXERS.items() if mixer.needs_fla).rsplit(", ", 1))


def with_inference(plan: LayerPlan, settings: InferenceConfig, trained_context: int) -> LayerPlan:
    """The plan with `settings` put on the heads they act on. Raises ConfigError for a setting that is wrong, or acts on no head."""
    problems = list(_problems(settings))
    used: set[str] = set()

    def changed(group: HeadGroup) -> HeadGroup:
        values = _of_group(group, settings)
        used.update(values)
        return replace(group, inference=Inference(trained_context=trained_context, **values)) if values else group

    layers = tuple(replace(layer, groups=tuple(changed(group) for group in layer.groups)) for layer in plan)
    asked = {
        "logit_scale": (settings.logit_scale != "none", "attention without position"),
        "dynamic_ntk": (settings.dynamic_ntk, "attention with RoPE"),
        "window": (settings.rope_window is not None, "attention with RoPE"),
        "swla_window": (settings.swla_window is not None, _LINEAR),
    }
    for name, (wanted, heads) in asked.items():
        if wanted and name not in used:
            key = "rope_window" if name == "window" else name
            problems.append(
                f"inference.{key}={as_written(getattr(settings, key))}: it acts on {heads}, and this model has none of it; leave it out"
            )
    if problems:
        raise ConfigError(problems)
    return LayerPlan(layers)


def _of_group(group: HeadGroup, settings: InferenceConfig) -> dict:
    """The settings that act on this group, by Inference's names."""
    if MIXERS[group.mixer].needs_fla:
        if settings.swla_window is None:
            return {}
        return {"swla_window": settings.swla_window, "swla_stride": settings.swla_stride or settings.swla_window // 4}
    if group.mixer != "attention":
        return {}
    if group.position == "nope":
        if settings.logit_scale == "none":
            return {}
        return {"logit_scale": settings.logit_scale, "logit_scale_value": settings.logit_scale_value}
    return ({"dynamic_ntk": True} if settings.dynamic_ntk else {}) | (
        {} if settings.rope_window is None else {"window": settings.rope_window}
    )


def _problems(settings: InferenceConfig):
    kind, value = settings.logit_scale, settings.logit_scale_value
    given = f"inference.logit_scale_value={as_written(value)}"
    if kind not in LOGIT_SCALES:
        yield f"inference.logit_scale={kind}: it must be one of {', '.join(LOGIT_SCALES)}"
    elif kind == "hype" and (value is None or not 1 < value < math.inf):
        yield f"{given}: with logit_scale=hype it is the base a and must be more than 1, e.g. 300"
    elif kind == "constant" and (value is None or not 0 < value < math.inf):
        yield f"{given}: with logit_scale=constant it is the factor and must be more than 0, e.g. 1.5"
    elif kind in ("none", "log") and value is not None:
        yield f"{given}: logit_scale={kind} takes no value; leave it out"
    if settings.rope_window is not None and settings.rope_window < 1:
        yield f"inference.rope_window={settings.rope_window}: it must be at least 1 token"
    if settings.rope_window is not None and settings.dynamic_ntk:
        yield "inference.dynamic_ntk=true: with rope_window no two tokens further apart than that meet; choose one of the two"
    window, stride = settings.swla_window, settings.swla_stride
    if window is None and stride is not None:
        yield f"inference.swla_stride={stride}: it is the stride of swla_window, which is not set; set both"
    elif window is not None and (window < 1 or (stride is not None and stride < 1)):
        key, value = ("swla_window", window) if window < 1 else ("swla_stride", stride)
        yield f"inference.{key}={value}: it must be at least 1 token"
    elif window is not None and window % (stride if stride is not None else 4):
        said = f"swla_stride={stride}" if stride is not None else "swla_stride unset, so a quarter of the window"
        yield f"inference.swla_window={window} with {said}: the window must be a multiple of the stride"
