"""How long a run takes at a share of the device's peak."""

from hybrid_megatron.model.accounting import account
from hybrid_megatron.planning.layout import Layout
from hybrid_megatron.platform.device import peak_flops_of

DEVICE = "NVIDIA H200"
MEASURED_MFU = 0.46
"""776m+gdn_nope_lh on one H200 had 47.9% at 4,096 tokens a sample and 46.3% at 32,768, 776m+rope 52.1% and 50.3%; over two GPUs in data
parallel they kept 0.98 to 1.00 of it (benchmarks/README.md)."""
KEPT = 0.82
"""Of one GPU's speed, for each of tensor, context and pipeline above 1, as two ranks of 776m+rope kept: 0.82 by tensor at 4,096 tokens,
0.82 by context at 32,768, and 0.83 by pipeline beside the waiting (benchmarks/README.md). Of a longer context more: 0.94 at 131,072."""

EXPECTED = (
    "as 776m+gdn_nope_lh on one H200, less recomputation and waiting of pipeline stages, and 18% for each of tensor, context and pipeline "
    "above 1, which is what two ranks of 776m+rope lost"
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
        "mfu_from": EXPECTED if mfu is None else "as given",
        "tokens_per_second_per_gpu": speed,
        "step_seconds": config.train.batch_tokens / speed / layout.gpus,
        "hours": hours,
        "gpu_hours": hours * layout.gpus,
    }


def expected_mfu(layout: Layout) -> float:
    """MEASURED_MFU, less what is recomputed (work that MFU does not count), less the time that pipeline stages wait for each other,
    (pipeline - 1) of micro_batches * virtual_pipeline + pipeline - 1 passes, and what KEPT leaves of it."""
    forward = account(layout.config, layout.plan).forward_flops_per_token
    of_layers = sum(flops for part, flops in forward.items() if part != "output_layer")
    again = {"none": 0, "selective": forward["mlp"], "full": of_layers}[layout.config.train.recompute]
    counted = 3 * sum(forward.values())
    parallel = layout.config.parallel
    passes = layout.micro_batches * parallel.virtual_pipeline
    spread = KEPT ** sum(size > 1 for size in (parallel.tensor, parallel.context, parallel.pipeline))
    return MEASURED_MFU * spread * counted / (counted + again) * passes / (passes + parallel.pipeline - 1)
