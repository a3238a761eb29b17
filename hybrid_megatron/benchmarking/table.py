"""Lines of results as tables for a screen."""

from hybrid_megatron.benchmarking.cells import PEERS


def table(lines: list[dict]) -> str:
    """Speed, memory and ratios; then, if there are profiles, the parts of a step; then what failed."""
    peers = [peer for peer in PEERS if any(peer in line["ratios"] for line in lines)]
    head = ["", "context", "batch", "tokens/s/GPU", "MFU", "memory GiB", "step ms", "first step s", *(f"/ {peer}" for peer in peers)]
    parts = [aligned([head, *(_cells(line, peers) for line in lines)])]
    if profiled := [line for line in lines if line["profile"]]:
        parts.append(_profiles(profiled))
    parts += [f"{line['name']} at {line['context']:,}: {line['failed']}" for line in lines if line["failed"]]
    return "\n\n".join(parts)


def _cells(line: dict, peers: list[str]) -> list[str]:
    if line["step_seconds"] is None:
        return [line["name"], f"{line['context']:,}", "failed"]
    again = "" if line["recompute"] == "none" else f", {line['recompute']} recompute"
    return [
        line["name"],
        f"{line['context']:,}",
        f"{line['micro_batches']} x {line['micro_batch']}{again}",
        f"{line['tokens_per_second_per_gpu']:,.0f}",
        "-" if line["mfu"] is None else f"{line['mfu']:.1%}",
        f"{line['peak_memory_gib']:.1f}",
        f"{line['step_seconds'] * 1e3:,.0f}",
        f"{line['first_step_seconds']:.1f}",
        *(f"{line['ratios'][peer]:.2f}x" if peer in line["ratios"] else "-" for peer in peers),
    ]


def _profiles(lines: list[dict]) -> str:
    """Percents of a step by kind, and how often in a step the host waits for the device."""
    kinds = [kind for kind in lines[0]["profile"]["split_seconds"] if any(line["profile"]["split_seconds"][kind] for line in lines)]
    rows = [["where a step's time goes, %", "context", *kinds, "waits"]]
    for line in lines:
        profile = line["profile"]
        shares = [f"{profile['split_seconds'][kind] / profile['step_seconds']:.1%}".rstrip("%") for kind in kinds]
        rows.append([line["name"], f"{line['context']:,}", *shares, f"{sum(profile['synchronisations'].values()):g}"])
    return aligned(rows)


def aligned(rows: list[list[str]]) -> str:
    """Rows of cells as lines: the first column to the left, the others to the right; a row may end early."""
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))) for row in rows
    )
