"""Commands of this project as a person pastes them into the shell that shows them."""

import shlex
import sys
from pathlib import Path


def interpreter() -> str:
    """The Python that runs, quoted for a shell; short where it lies below the present folder, as .venv/bin/python does."""
    path = Path(sys.executable)
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def pasted(module: str, *words: object) -> str:
    """E.g. `.venv/bin/python -m launch status 'runs/with a space'`."""
    return f"{interpreter()} -m {shlex.join([module, *map(str, words)])}"
