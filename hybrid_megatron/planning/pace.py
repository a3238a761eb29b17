"""How long a run takes at a share of the device's peak."""

from hybrid_megatron.model.accounting import account
from hybrid_megatron.planning.layout import Layout
from hybrid_megatron.platform.device import peak_flops_of

DEVICE = "NVIDIA H200"
MEASURED_MFU = 0.40
"""776m+gdn_nope_lh+pretrain_4k on one H200 had 40.8%, 776m+rope+pretrain_4k 48.6% (benchmarks/performance.md); two GPUs in data parallel
kept 0.99 of it, other layouts are not measured."""

EXPECTED = "as 776m+gdn_nope_lh on one H200, less recomputation and waiting of pipeline stages; tensor and context ranks are not measured"


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
    """MEASURED_MFU, less what is recomputed (work that MFU does not count) and less the time that pipeline stages wait for each other,
    (pipeline - 1) of micro_batches * virtual_pipeline + pipeline - 1 passes."""
    forward = account(layout.config, layout.plan).forward_flops_per_token
    of_layers = sum(flops for part, flops in forward.items() if part != "output_layer")
    again = {"none": 0, "selective": forward["mlp"], "full": of_layers}[layout.config.train.recompute]
    counted = 3 * sum(forward.values())
    passes = layout.micro_batches * layout.config.parallel.virtual_pipeline
    return MEASURED_MFU * counted / (counted + again) * passes / (passes + layout.config.parallel.pipeline - 1)
