"""How long a run takes at a share of the device's peak."""

from collections import Counter

from hybrid_megatron.model.accounting import account
from hybrid_megatron.model.pattern import LayerPlan
from hybrid_megatron.planning.layout import Layout
from hybrid_megatron.platform.device import peak_flops_of

DEVICE = "NVIDIA H200"
MEASURED_MFU = {"attention": 0.50, "swa": 0.51, "gdn": 0.48, "gla": 0.48, "kda": 0.41, "lightning": 0.49, "mamba2": 0.49, "rwkv7": 0.39}
"""Of one H200, 776m+rope and 776m+MIXER_nope_lh (README, What was measured): the lower of 4,096 and 32,768 tokens a sample; kda, mamba2 and
rwkv7 at 4,096 alone; lightning, which has mamba2's kernels, as that. Over two GPUs in data parallel they kept 0.98 to 1.00 of it
(benchmarks/README.md)."""
KEPT = 0.82
"""Of one GPU's speed, for each of tensor, context and pipeline above 1, as two ranks of 776m+rope kept: 0.82 by tensor at 4,096 tokens,
0.82 by context at 32,768, and 0.83 by pipeline beside the waiting (benchmarks/README.md). Of a longer context more: 0.94 at 131,072."""

LESS = (
    "less recomputation and waiting of pipeline stages, and 18% for each of tensor, context and pipeline above 1, which is what two ranks "
    "of 776m+rope lost"
)


def pace(layout: Layout, mfu: float | None = None) -> dict:
    """Speed and duration; `mfu` of the dense bf16 peak in model FLOPs, None: `expected_mfu`. Validation, checkpoints and restarts are not
    in it."""
    config, peak = layout.config, peak_flops_of(DEVICE)
    assert peak is not None
    share = expected_mfu(layout) if mfu is None else mfu
    speed = peak * share / account(config, layout.plan).flops_per_token
    hours = config.batch_plan.total_tokens / speed / layout.gpus / 3600
    return {
        "device": DEVICE,
        "peak_flops": peak,
        "mfu": share,
        "mfu_from": f"as {_like(layout.plan)} on one H200, {LESS}" if mfu is None else "as given",
        "tokens_per_second_per_gpu": speed,
        "step_seconds": config.train.batch_tokens / speed / layout.gpus,
        "hours": hours,
        "gpu_hours": hours * layout.gpus,
    }


def expected_mfu(layout: Layout) -> float:
    """`measured_mfu`, less what is recomputed (work that MFU does not count), less the time that pipeline stages wait for each other,
    (pipeline - 1) of micro_batches * virtual_pipeline + pipeline - 1 passes, and what KEPT leaves of it."""
    forward = account(layout.config, layout.plan).forward_flops_per_token
    of_layers = sum(flops for part, flops in forward.items() if part != "output_layer")
    again = {"none": 0, "selective": forward["mlp"], "full": of_layers}[layout.config.train.recompute]
    counted = 3 * sum(forward.values())
    parallel = layout.config.parallel
    passes = layout.micro_batches * parallel.virtual_pipeline
    spread = KEPT ** sum(size > 1 for size in (parallel.tensor, parallel.context, parallel.pipeline))
    return measured_mfu(layout.plan) * spread * counted / (counted + again) * passes / (passes + parallel.pipeline - 1)


def measured_mfu(plan: LayerPlan) -> float:
    """Of MEASURED_MFU, with the time of each mixer beside full attention by its share of heads; full attention's own for it alone."""
    heads = _heads_beside_attention(plan) or Counter(attention=1)
    return heads.total() / sum(count / MEASURED_MFU[mixer] for mixer, count in heads.items())


def _like(plan: LayerPlan) -> str:
    mixers = sorted(_heads_beside_attention(plan))
    return " and ".join(f"776m+{mixer}_nope_lh" for mixer in mixers) or "776m+rope"


def _heads_beside_attention(plan: LayerPlan) -> Counter[str]:
    heads: Counter[str] = Counter()
    for layer in plan:
        for group in layer.groups:
            if group.mixer != "attention":
                heads[group.mixer] += group.heads
    return heads
