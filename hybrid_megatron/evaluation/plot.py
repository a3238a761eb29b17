"""Evaluations drawn: loss by position at the longest length, and perplexity by length."""

import math
from typing import BinaryIO


def draw(evaluation: dict, others: list[dict], file: BinaryIO) -> None:
    """PNG of one evaluation (a Report as plain data) over other ones that may be compared with it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    FigureCanvasAgg(figure)
    by_position, by_length = figure.subplots(1, 2)
    run, longest = evaluation["run"], evaluation["lengths"][-1]["length"]
    figure.suptitle(f"{run['name']}, {evaluation['checkpoint']['name']}: {evaluation['data']['prefix']}")
    by_position.set(xlabel=f"position, in samples of {longest:,} tokens", ylabel="nats per token", xscale="log")
    by_length.set(xlabel="tokens a sample", ylabel="perplexity", xscale="log")
    by_length.set_xticks([line["length"] for line in evaluation["lengths"]], [f"{line['length']:,}" for line in evaluation["lengths"]])
    by_length.minorticks_off()
    perplexities = [line["perplexity"] for each in (*others, evaluation) for line in each["lengths"]]
    if max(perplexities) > 10 * min(perplexities):  # some setting fails beyond the training length
        by_length.set_yscale("log")
    for each in (*others, evaluation):
        style = {"lw": 2.0 if each is evaluation else 1.0, "label": each["name"]}
        if at_longest := [line["positions"] for line in each["lengths"] if line["length"] == longest]:
            edges, loss = at_longest[0]["edges"], at_longest[0]["loss"]
            # position 1 is the first: a logarithm has no 0
            middles = [math.sqrt((begin + 1) * end) for begin, end in zip(edges, edges[1:])]
            by_position.plot(middles, loss, **style)
        by_length.plot([line["length"] for line in each["lengths"]], [line["perplexity"] for line in each["lengths"]], "o-", ms=4, **style)
    for axes in (by_position, by_length):
        axes.axvline(run["trained_context"], ls="--", color="gray", label="training length")
        axes.grid(alpha=0.3)
    by_length.legend()
    figure.savefig(file, dpi=120, format="png")
