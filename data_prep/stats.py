"""`stats`: how many documents and tokens a dataset has, and how long its documents are."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.indexed_dataset import IndexedDataset
from hybrid_megatron.errors import DataError

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
THRESHOLDS = tuple(1 << power for power in range(12, 21))  # 4,096 to 1,048,576 tokens


@dataclass(frozen=True)
class Stats:
    """Lengths in tokens, BOS and EOS included."""

    documents: int
    tokens: int
    shortest: int
    longest: int
    mean: float
    quantiles: dict[float, int]
    """q -> the least length such that a share q of the documents is not longer."""
    at_least: dict[int, dict[str, int]]
    """Length -> documents that are at least so long, and the tokens in them."""
    lengths: np.ndarray
    """i64: the different lengths there are, ascending."""
    counts: np.ndarray
    """i64: documents of each of these lengths."""


def dataset_stats(prefix: Path) -> Stats:
    """Reads the index alone. Exact, in memory for the different lengths only, of which n tokens can have no more than sqrt(2 n)."""
    lengths, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for piece in IndexedDataset(prefix).length_pieces():
        found, times = np.unique(piece.astype(np.int64), return_counts=True)
        lengths, places = np.unique(np.concatenate([lengths, found]), return_inverse=True)
        counts = np.bincount(places, np.concatenate([counts, times]), len(lengths)).astype(np.int64)
    if not len(lengths):
        raise DataError(f"{prefix} has no documents; build it again with `python -m data_prep tokenize`")
    documents, tokens = int(counts.sum()), int((lengths * counts).sum())
    up_to = np.cumsum(counts)
    return Stats(
        documents,
        tokens,
        int(lengths[0]),
        int(lengths[-1]),
        tokens / documents,
        {q: int(lengths[np.searchsorted(up_to, np.ceil(q * documents))]) for q in QUANTILES},
        {
            least: {"documents": int(counts[lengths >= least].sum()), "tokens": int((lengths * counts)[lengths >= least].sum())}
            for least in THRESHOLDS
        },
        lengths,
        counts,
    )


def stats_table(stats: Stats) -> str:
    """The numbers, for people."""
    lines = [f"{stats.documents:,} documents, {stats.tokens:,} tokens"]
    lines.append(f"length in tokens: shortest {stats.shortest:,}, mean {stats.mean:,.1f}, longest {stats.longest:,}")
    lines.append("  not longer than: " + ", ".join(f"{100 * q:g}% {length:,}" for q, length in stats.quantiles.items()))
    lines.append(f"{'at least':>10} {'documents':>16} {'share':>8} {'tokens':>20} {'share':>8}")
    for least, held in stats.at_least.items():
        documents, tokens = held["documents"], held["tokens"]
        shares = f"{100 * documents / stats.documents:.2f}%", f"{100 * tokens / stats.tokens:.2f}%"
        lines.append(f"{least:>10,} {documents:>16,} {shares[0]:>8} {tokens:>20,} {shares[1]:>8}")
    return "\n".join(lines)


def plot_lengths(stats: Stats, title: str, path: Path) -> None:
    """Histogram over powers of two: the share of documents and of tokens in documents of each length. `path` is a .png."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if path.suffix != ".png":
        raise DataError(f"--plot {path} should be a file that ends in .png")
    edges = 2.0 ** np.arange(np.floor(np.log2(stats.shortest)), np.floor(np.log2(stats.longest)) + 2)
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="length of a document (tokens)", ylabel="share", title=title)
    axes.set_xscale("log", base=2)
    for label, weights, total in (
        ("documents", stats.counts, stats.documents),
        ("tokens in them", stats.lengths * stats.counts, stats.tokens),
    ):
        shares = np.histogram(stats.lengths, edges, weights=weights)[0] / total
        axes.stairs(shares, edges, fill=True, alpha=0.5, label=label)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise DataError(f"--plot {path} cannot be written ({error.strerror}); choose another file") from None
