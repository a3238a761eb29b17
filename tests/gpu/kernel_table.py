"""What the tests of kernels measure: one row a case, printed, and written to the file that KERNEL_TABLE names, if it is set."""

import json
import os


def record(kernel: str, case: str, errors: dict[str, float], bound: float) -> None:
    """Append {"kernel", "case", "errors": {tensor: relative error}, "bound"} as a line of JSON."""
    row = json.dumps({"kernel": kernel, "case": case, "errors": {name: float(f"{x:.3g}") for name, x in errors.items()}, "bound": bound})
    print(row)
    if path := os.environ.get("KERNEL_TABLE"):
        with open(path, "a") as table:
            table.write(row + "\n")
