"""Lines of results drawn: tokens per second, memory and MFU by context length, and where a step's time goes."""

from pathlib import Path

from hybrid_megatron.benchmarking.kernel_kinds import KINDS, OTHER

_FIGURES = {
    "tokens_per_second": ("tokens_per_second_per_gpu", "tokens per second per GPU"),
    "memory": ("peak_memory_gib", "peak memory, GiB"),
    "mfu": ("mfu", "MFU"),
}


def plot_results(lines: list[dict], folder: Path) -> list[Path]:
    """PNGs of what is known; the files written."""
    written = []
    for name, (key, title) in _FIGURES.items():
        known = [line for line in lines if line[key] is not None]
        if known:
            written.append(_by_context(known, key, title, folder / f"{name}.png"))
    profiled = [line for line in lines if line["profile"]]
    return written + ([_parts_of_a_step(profiled, folder / "parts_of_a_step.png")] if profiled else [])


def _by_context(lines: list[dict], key: str, title: str, path: Path) -> Path:
    """A curve for each name; bars where there is one context only. Peers are dashed, or hatched."""
    contexts = sorted({line["context"] for line in lines})
    names = list(dict.fromkeys(line["name"] for line in lines))
    figure = _figure(height=5.0 if len(contexts) > 1 else 1.2 + 0.4 * len(names))
    if len(contexts) == 1:
        axes = figure.add_subplot(xlabel=f"{title}, at {contexts[0]:,} tokens a sample")
        for line in lines:
            axes.barh(line["name"], line[key], hatch="//" if line["peer"] else None, color="lightgray" if line["peer"] else "C0")
        axes.invert_yaxis()
        return _saved(figure, axes, path)
    axes = figure.add_subplot(xlabel="tokens a sample", ylabel=title, xscale="log")
    for name in names:
        own = sorted((line["context"], line[key], line["peer"]) for line in lines if line["name"] == name)
        axes.plot([x for x, _, _ in own], [y for _, y, _ in own], "o--" if own[0][2] else "o-", ms=4, label=name)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.minorticks_off()
    axes.set_ylim(0, None)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return _saved(figure, axes, path)


def _parts_of_a_step(lines: list[dict], path: Path) -> Path:
    """A stacked bar for each line, in milliseconds for 1,000 tokens of a GPU, so that batches of different sizes compare."""
    figure = _figure(height=1.8 + 0.4 * len(lines))
    axes = figure.add_subplot(xlabel="milliseconds of a GPU for 1,000 tokens")
    labels = [f"{line['name']}, {line['context']:,}" for line in lines]
    left = [0.0] * len(lines)
    for i, kind in enumerate((*KINDS, OTHER)):
        widths = [line["profile"]["split_seconds"][kind] * 1e6 * line["gpus"] / line["tokens"] for line in lines]
        if any(widths):
            axes.barh(labels, widths, left=left, label=kind, color=f"C{i}")
        left = [begin + width for begin, width in zip(left, widths)]
    axes.invert_yaxis()
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return _saved(figure, axes, path)


def _figure(height: float):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _saved(figure, axes, path: Path) -> Path:
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=120)
    return path
