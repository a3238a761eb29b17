"""Rows of single measurements -> one line for each recipe and peer at each context, with its ratios to the peers; CSV and JSON.

A line has the medians over its rounds, and

  ratios     {peer: tokens per second per GPU over those of the peer at the same size, context and round; the median of the rounds}
  lowest, highest    tokens per second per GPU of its slowest and fastest round
  failed     why a round gave nothing; None if all gave figures
"""

import csv
import json
import statistics
from pathlib import Path

RATE = "tokens_per_second_per_gpu"
_FIGURES = (
    RATE, "mfu", "model_tflops_per_gpu", "peak_memory_gib", "reserved_memory_gib", "planned_memory_gib", "step_seconds",
    "first_step_seconds", "start_to_first_step_seconds",
)  # fmt: skip
_FACTS = ("device", "gpus", "parameters", "micro_batch", "micro_batches", "recompute", "precision", "tokens")


def summarise(rows: list[dict]) -> list[dict]:
    """Lines in the order in which the rows of the first round were measured; peers stand where they ran."""
    lines: dict[tuple, list[dict]] = {}
    for row in rows:
        lines.setdefault((row["context"], row["name"]), []).append(row)
    return [_line(rounds, rows) for rounds in lines.values()]


def _line(rounds: list[dict], rows: list[dict]) -> dict:
    good = [row for row in rounds if row["failed"] is None]
    reasons = [row["failed"] for row in rounds if row["failed"] is not None]
    rates = [row[RATE] for row in good]
    profiled = [row["profile"] for row in good if row["profile"]]
    return {
        **{key: rounds[0][key] for key in ("name", "recipe", "peer", "context")},
        "failed": reasons[0] if reasons else None,
        **{key: good[0][key] if good else None for key in _FACTS},
        **{key: _median(row.get(key) for row in good) for key in _FIGURES},
        "lowest": min(rates, default=None),
        "highest": max(rates, default=None),
        "ratios": _ratios(good, rows),
        "profile": profiled[-1] if profiled else None,
    }


def _ratios(good: list[dict], rows: list[dict]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for row in good:
        for other in rows:
            same = (other["context"], other["round"], other["recipe"]) == (row["context"], row["round"], row["peers_like"])
            if same and other["peer"] is not None and other["failed"] is None:
                found.setdefault(other["peer"], []).append(row[RATE] / other[RATE])
    return {peer: statistics.median(ratios) for peer, ratios in found.items()}


def _median(values) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def write_results(rows: list[dict], words: list[str], folder: Path) -> None:
    """bench.json (the words of the command, every row, the lines) and bench.csv (the lines)."""
    lines = summarise(rows)
    whole = {"command": ["python", "-m", "launch", "bench", *words], "lines": lines, "rows": rows}
    (folder / "bench.json").write_text(json.dumps(whole, indent=1) + "\n")
    flat = [_flat(line) for line in lines]
    with (folder / "bench.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for line in flat for key in line)))
        writer.writeheader()
        writer.writerows(flat)


def _flat(line: dict) -> dict:
    """Ratios and parts of a step as columns of their own."""
    ratios = {f"ratio_to_{peer}": ratio for peer, ratio in line["ratios"].items()}
    parts = {f"{kind} seconds": seconds for kind, seconds in (line["profile"] or {"split_seconds": {}})["split_seconds"].items()}
    return {key: value for key, value in line.items() if key not in ("ratios", "profile")} | ratios | parts
