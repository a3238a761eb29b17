"""Which code this is: the commit of a checkout, or what a copy says of itself. Imports nothing heavy: a login node asks too."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("launch", "hybrid_megatron", "data_prep", "recipes", "slurm", "pyproject.toml", "constraints.txt", "setup.sh", "Makefile")
"""What runs: tests, notes and data are no part of it."""


def code_version(root: Path = ROOT) -> str | None:
    """The commit of the checkout at `root`, `-dirty` behind it where a file of PARTS is not as in it.

    A copy that is no checkout has the one line of its file `code_version` instead (slurm/snapshot.py); None without either.
    """
    if (commit := git(root, "rev-parse", "HEAD")) is not None:
        return commit.strip() + ("-dirty" if git(root, "status", "--porcelain", "--", *PARTS) else "")
    try:
        return (root / "code_version").read_text().strip() or None
    except OSError:
        return None


def git(root: Path, *words: str) -> str | None:
    """What git says in this folder; None without git, or where the folder is no checkout of its own but lies in another's."""
    try:
        top = _run(root, "rev-parse", "--show-toplevel")
        return _run(root, *words) if Path(top.strip()).resolve() == root.resolve() else None
    except (OSError, subprocess.SubprocessError):
        return None


def _run(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True, timeout=30).stdout
