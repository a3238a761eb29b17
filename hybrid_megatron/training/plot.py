"""loss.png of a run folder: training and validation loss over tokens."""

from pathlib import Path

from hybrid_megatron.training.tracking import read_metrics


def plot_losses(run_dir: Path, baseline: tuple[str, float] | None = None) -> Path:
    """Draw from metrics.jsonl; `baseline` is a named horizontal line, in nats."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = read_metrics(run_dir / "metrics.jsonl")
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="tokens (millions)", ylabel="nats per token", title=run_dir.name)
    trained = [m for m in metrics if "lm_loss" in m]
    axes.plot([m["tokens"] / 1e6 for m in trained], [m["lm_loss"] for m in trained], lw=0.8, label="training loss")
    measured = [m for m in metrics if "validation_loss" in m]
    if measured:
        axes.plot([m["tokens"] / 1e6 for m in measured], [m["validation_loss"] for m in measured], "o-", ms=3, label="validation loss")
    if baseline:
        axes.axhline(baseline[1], ls="--", color="gray", label=f"{baseline[0]} ({baseline[1]:.2f})")
    axes.grid(alpha=0.3)
    axes.legend()
    path = run_dir / "loss.png"
    figure.savefig(path, dpi=120)
    return path
