"""A copy of the code in a run folder, from which a job and its requeues run while the project's folder goes on changing.

    RUN_DIR/code/HASH/   launch/, hybrid_megatron/, data_prep/, recipes/, slurm/ and the versions of packages, as they were
                         .venv          link to the Python environment that submitted
                         code_version   one line: the commit, COMMIT-dirty where files differ from it, or the hash where there is no git

HASH is of all contents, so that a folder never changes once it is there, and the same code is copied once.
"""

import hashlib
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from hybrid_megatron.code_version import PARTS, ROOT, code_version, git
from hybrid_megatron.errors import RunError


@dataclass(frozen=True)
class Snapshot:
    """Code that is not copied yet."""

    files: dict[str, Path]
    """Place in the snapshot -> the file that goes there."""
    python: Path
    """Folder of the Python environment."""
    version: str
    hash: str

    def write(self, run_dir: Path) -> Path:
        """Its folder in a run folder, made unless it is there. Raises RunError."""
        final = run_dir / "code" / self.hash
        if final.is_dir():
            return final
        partial = final.with_name(f".{self.hash}.{os.getpid()}.partial")
        try:
            for place, file in self.files.items():
                (partial / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, partial / place)
            (partial / ".venv").symlink_to(self.python)
            (partial / "code_version").write_text(self.version + "\n")
            partial.rename(final)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if not final.is_dir():  # another submit was faster
                raise RunError(
                    f"{final}: the code cannot be copied there ({error.strerror}); give another folder with run_dir=PATH"
                ) from None
        return final


def snapshot(extra: dict[str, Path], project: Path = ROOT) -> Snapshot:
    """The code as it is now; `extra` adds files, by their place in the snapshot."""
    files = {name: project / name for name in _files(project)} | extra
    digest = hashlib.sha256(sys.prefix.encode())
    for place in sorted(files):
        contents = files[place].read_bytes()
        digest.update(f"\0{place}\0{files[place].stat().st_mode & 0o111}\0{len(contents)}\0".encode())
        digest.update(contents)
    name = digest.hexdigest()[:12]
    return Snapshot(files, Path(sys.prefix), code_version(project) or name, name)


def _files(project: Path) -> list[str]:
    """What git knows or would know, by its present contents; without git everything but caches and hidden files."""
    listed = git(project, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *PARTS)
    if listed is not None:
        return sorted({name for name in listed.split("\0") if name and (project / name).is_file()})
    found = [path for part in PARTS for path in ((project / part).rglob("*") if (project / part).is_dir() else [project / part])]
    names = [path.relative_to(project) for path in found if path.is_file()]
    return sorted(str(name) for name in names if not any(part.startswith(".") or part == "__pycache__" for part in name.parts))
