"""python -m hybrid_megatron.benchmarking.cell_process CELL RESULT: measure one cell; rank 0 writes its row to a file."""

import json
import os
import sys
import time
from pathlib import Path

from hybrid_megatron.benchmarking.cells import Cell
from hybrid_megatron.errors import exit_with_code_2


def main(cell: Cell, result: Path, process_began: float) -> None:
    speaks = os.environ.get("RANK", "0") == "0"
    with exit_with_code_2(speaks=speaks):
        if cell.peer is None:
            from hybrid_megatron.benchmarking.measure import measure as row_of
        else:
            from hybrid_megatron.benchmarking.peers import measure_peer as row_of
        row = row_of(cell, process_began)
        if speaks:
            result.write_text(json.dumps(row))


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    began = settings.pop("process_began", time.time())
    main(Cell(**settings | {"overrides": tuple(settings["overrides"])}), Path(sys.argv[2]), began)
