"""Slurm's commands as scripts in a folder, which note what they are asked and answer what a test says."""

from pathlib import Path

_SBATCH = """#!/bin/bash
printf '%s\\0' "$@" >{folder}/sbatch.$((100 + $(ls {folder} | grep -c sbatch.1)))
jobs=$(ls {folder} | grep -c sbatch.1)
if [[ -e {folder}/refuses && $jobs -ge $(<{folder}/refuses) ]]; then
    echo "sbatch: error: Batch job submission failed: Invalid partition name specified" >&2
    exit 1
fi
echo $((99 + jobs))
"""
_SQUEUE = "#!/bin/bash\ncat {folder}/squeue\n"
_SCANCEL = """#!/bin/bash\necho "$@" >>{folder}/scancel\n"""


class FakeSlurm:
    def __init__(self, folder: Path, bin: Path):
        """`bin`: the folder on PATH where the commands go. Jobs get the ids 100, 101, ..."""
        self.folder = folder
        folder.mkdir()
        (folder / "squeue").touch()
        for name, script in {"sbatch": _SBATCH, "squeue": _SQUEUE, "scancel": _SCANCEL}.items():
            (bin / name).write_text(script.replace("{folder}", str(folder)))
            (bin / name).chmod(0o755)

    def refuse(self, number: int) -> None:
        """The submission of this number, 1 the first, and all after it."""
        (self.folder / "refuses").write_text(str(number))

    def jobs(self, *states: tuple[str, str]) -> None:
        """What squeue knows: ids and states."""
        (self.folder / "squeue").write_text("".join(f"{id}|{state}|None|node1|1:00|23:00|now\n" for id, state in states))

    @property
    def asked(self) -> list[list[str]]:
        """The words of sbatch, by submission."""
        return [file.read_text().split("\0")[:-1] for file in sorted(self.folder.glob("sbatch.*"))]

    @property
    def cancelled(self) -> list[str]:
        file = self.folder / "scancel"
        return file.read_text().splitlines() if file.is_file() else []
