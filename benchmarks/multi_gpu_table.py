"""python benchmarks/multi_gpu_table.py FOLDER: what benchmarks/multi_gpu.sh left there, as one table of aims and what was seen."""

import json
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.cpu.parity_table import ParityTable  # noqa: E402
from tests.gpu.test_zoo import BOUNDS  # noqa: E402

AIMS = {2: 0.95, 4: 0.94, 8: 0.93}
"""Tokens per second and GPU of 776m at 4,096 on so many GPUs, over one GPU's."""


def main(folder: Path) -> None:
    rows = [*tests(folder), *speed(folder), *context(folder), *checkpoint(folder)]
    if not rows:
        sys.exit(f"error: {folder}: benchmarks/multi_gpu.sh has left nothing there")
    widths = [max(len(row[i]) for row in rows) for i in range(3)]  # sentences, so all columns stand to the left
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def tests(folder: Path) -> list[tuple[str, str, str]]:
    """How many passed, and the worst cells of parity, whose tables become parity.md."""
    rows = []
    for name, what in (
        ("parity", "every layout computes what one GPU computes"), ("reshard", "checkpoints go on under other layouts"),
        ("failures", "a rank killed, failed, hanging: the run has all its steps"),
    ):  # fmt: skip
        if logs := sorted(folder.glob(f"{name}*.log")):
            rows.append((what, "all pass", endings([log.read_text() for log in logs])))
    for precision, table in parity_tables(folder / "parity.jsonl").items():
        rows.append((f"parity, {precision}", "", table[table.index("Worst of") :].split(". Bounds")[0]))
    return rows


def endings(logs: list[str]) -> str:
    """pytest's counts, of all logs together."""
    counts: Counter[str] = Counter()
    for log in logs:
        ended = [line for line in log.splitlines() if re.search(r"\d+ (passed|failed|errors?|skipped).* in [\d.]+s", line)]
        found = re.findall(r"(\d+) (passed|failed|error|skipped)", ended[-1]) if ended else [(1, "did not end")]
        counts.update({what: int(number) for number, what in found})
    return ", ".join(f"{number} {what}" for what, number in counts.items())


def parity_tables(cells: Path) -> dict[str, str]:
    """A table a precision, in parity.md beside the cells too."""
    tables = {precision: ParityTable() for precision in BOUNDS}
    for line in cells.read_text().splitlines() if cells.exists() else []:
        precision, *cell = json.loads(line)
        tables[precision].note(*cell)
    told = {
        precision: table.markdown("over NCCL", " and ".join(f"{bound:.0e}" for bound in BOUNDS[precision]), precision)
        for precision, table in tables.items() if table.cells
    }  # fmt: skip
    if told:
        cells.with_suffix(".md").write_text("\n".join(told.values()))
    return told


def speed(folder: Path) -> list[tuple[str, str, str]]:
    if not (path := folder / "layout_speed.json").exists():
        return []
    told = json.loads(path.read_text())
    rows = [row for row in told["rows"] if row["failed"] is None]
    rate = {(row["model"], row["context"], row["layout"]): row["tokens_per_second_per_gpu"] for row in rows}
    found = []
    for row in sorted(rows, key=lambda row: (row["context"], row["model"])):
        one, aim = rate.get((row["model"], row["context"], "one GPU")), ""
        if row["layout"].startswith("data") and (row["model"], row["context"]) == ("776m", 4096):
            aim = f"{AIMS.get(told['gpus'], 0.93):.2f}"
        elif row["context"] > 32_768 and row["gpus"] > 1:
            aim = "0.85"
        elif row["context"] == 4096 and row["model"] in ("1b", "3b") and row["gpus"] == 8 and row["layout"].startswith("data"):
            aim = "MFU 45%"
        efficiency = f", {row['tokens_per_second_per_gpu'] / one:.3f} of one GPU" if one and row["gpus"] > 1 else ""
        mfu = f", MFU {row['mfu']:.1%}" if row["mfu"] else ""
        found.append((
            f"{row['model']} at {row['context']:,}, {row['layout']}", aim,
            f"{row['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU{mfu}, {row['peak_memory_gib']:.1f} GiB{efficiency}",
        ))  # fmt: skip
    return found


def context(folder: Path) -> list[tuple[str, str, str]]:
    """How many times fewer bytes states are than all-to-all, and the time of each way."""
    if not (path := folder / "context_parallel.json").exists():
        return []
    told = json.loads(path.read_text())
    cells = {(row["mixer"], row["context"], row["way"]): row for row in told["rows"]}
    found = []
    for (mixer, length, way), row in sorted(cells.items()):
        if way == "alone":
            continue
        other = cells.get((mixer, length, "all_to_all"))
        fewer = f", {other['received_bytes'] / row['received_bytes']:.0f}x fewer bytes than all-to-all" if way == "states" else ""
        aim = "10x" if way == "states" and length == 32_768 * told["ranks"] else ""
        found.append((
            f"layer of {mixer} at {length:,} over {told['ranks']}, {way}", aim,
            f"{row['milliseconds']:.2f} ms, {row['received_bytes'] / 1e6:.2f} MB, {row['efficiency']:.2f} of one GPU{fewer}",
        ))  # fmt: skip
    return found


def checkpoint(folder: Path) -> list[tuple[str, str, str]]:
    if not (path := folder / "checkpoint_cost.json").exists():
        return []
    told = json.loads(path.read_text())
    return [
        (
            f"{told['words'][0]}: {save['form']} checkpoint {i + 1} on {told['processes']} GPUs", "",
            f"stall {save['stall_seconds']:.2f} s, complete after {save['seconds']:.1f} s, {save['bytes'] / 2**30:.1f} GiB",
        )
        for i, save in enumerate(told["saves"])
    ]  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
