"""Learning rate and batch over tokens, drawn from the recipe."""

from pathlib import Path

from hybrid_megatron.config.schema import RunConfig
from hybrid_megatron.errors import ConfigError
from hybrid_megatron.training.schedule import learning_rate

_POINTS = 500


def plot_schedule(config: RunConfig, path: Path) -> None:
    """Write a picture, in the format that the file's name says. Raises ConfigError if it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    batches, last = config.batch_plan, config.num_steps - 1
    warm, full = batches.steps_within(config.schedule.warmup_tokens), batches.phases[-1].first_step
    steps = sorted({last * i // _POINTS for i in range(_POINTS + 1)} | {step for step in (warm - 1, full) if 0 <= step <= last})
    tokens = [batches.tokens(step + 1) / 1e9 for step in steps]
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    above.plot(tokens, [learning_rate(config, step) for step in steps])
    above.set(ylabel="learning rate", title=config.name)
    below.step(tokens, [batches.batch_tokens(step) / 1e3 for step in steps], where="post")
    below.set(xlabel="tokens (billions)", ylabel="batch (k tokens)", ylim=(0, None))
    for axes in (above, below):
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: not written: {error}") from None
