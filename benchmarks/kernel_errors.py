"""python benchmarks/kernel_errors.py KERNELS.jsonl

The errors of the linear mixers' kernels as a table: a row for each kernel, head width and kind of case, with the largest relative error of
each tensor against the float64 definition. The file comes from the tests on a GPU:

    KERNEL_TABLE=kernels.jsonl python -m pytest tests/gpu/test_recurrence_kernels.py tests/gpu/test_gated_delta_rule.py
"""

import json
import sys
from pathlib import Path

COLUMNS = ("output", "final state", *(f"gradient of {name}" for name in ("q", "k", "v", "g", "beta", "a", "b", "initial state")))


def kind(case: str) -> tuple[str, str]:
    """(width, what is particular) of a case such as '2 x 200 x 12, width 64, initial state, documents'."""
    _, width, *words = case.split(", ")
    words = [word for word in words if word not in ("initial state", "no initial state")]
    return width.removeprefix("width "), ", ".join(words) or "lengths 1 to 1,000"


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__.strip())
    largest: dict[tuple[str, str, str], dict[str, float]] = {}
    for line in Path(sys.argv[1]).read_text().splitlines():
        row = json.loads(line)
        errors = largest.setdefault((row["kernel"], *kind(row["case"])), {})
        for name, error in row["errors"].items():
            errors[name] = max(errors.get(name, 0.0), error)
    print("| recurrence | width | case | " + " | ".join(name.replace("gradient of", "d") for name in COLUMNS) + " |")
    print("| --- | --- | --- |" + " ---: |" * len(COLUMNS))
    for (kernel, width, case), errors in sorted(largest.items()):
        cells = [f"{errors[name]:.1e}" if name in errors else "" for name in COLUMNS]
        print(f"| {kernel} | {width} | {case} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
