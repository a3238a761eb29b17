"""python -m hybrid_megatron.benchmarking.cell_process CELL RESULT: measure one cell; its row, or why there is none, goes to a new file.

On several GPUs every rank runs this; the first one that has something to tell writes the file.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from hybrid_megatron.benchmarking.cells import Cell
from hybrid_megatron.errors import UserError, exit_with_code_2

_LONGEST = 300


def main(cell: Cell, result: Path, process_began: float) -> None:
    with exit_with_code_2():
        try:
            if cell.peer is None:
                from hybrid_megatron.benchmarking.measure import measure as row_of
            else:
                from hybrid_megatron.benchmarking.peers import measure_peer as row_of
            row = row_of(cell, process_began)
        except Exception as error:
            _tell(result, {"failed": _reason(error)})
            raise
        if os.environ.get("RANK", "0") == "0":
            _tell(result, row)


def _tell(result: Path, row: dict) -> None:
    with contextlib.suppress(FileExistsError), result.open("x") as file:
        json.dump(row, file)


def _reason(error: Exception) -> str:
    """One line."""
    if isinstance(error, UserError):
        return "; ".join(str(error).splitlines())
    first = next(iter(str(error).strip().splitlines()), "")
    reason = f"{type(error).__name__}: {first}"
    return reason if len(reason) <= _LONGEST else reason[:_LONGEST] + " ..."


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    began = settings.pop("process_began", time.time())
    main(Cell(**settings | {"overrides": tuple(settings["overrides"])}), Path(sys.argv[2]), began)
