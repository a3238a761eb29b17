"""`parts/plan.json`: which shards a dataset is made of and how, so that several jobs make parts of one dataset and never of two.

Jobs of an array need no coordinator: the first one writes the plan, each later one compares its own with it.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data_prep.inputs import Shard
from data_prep.manifest import SUFFIX, differences
from data_prep.part import Job
from hybrid_megatron.errors import DataError

FORMAT = 1
NAME = "plan.json"


def agree_on_plan(job: Job, shards: Sequence[Shard], overwrite: bool, alone: bool) -> None:
    """Make the folder of parts with the plan, or find the same plan there.

    Raises `DataError` where parts of another plan are there. `alone` says that no other job shares the folder: then another plan gives
    way if `overwrite` says so or it has finished no part with a document.
    """
    plan = _plan(job, shards)
    path = job.parts / NAME
    found = _read(path)
    changed = differences(found, plan) if found is not None else []
    if stranger := next(_strangers(job.parts), None):
        raise DataError(f"{stranger}: it is not of this command, which keeps its parts there; move it, or choose another --output")
    if alone and (changed or found is None) and (overwrite or not _has_documents(job.parts)):
        shutil.rmtree(job.parts, ignore_errors=True)
        found, changed = None, []
    if found is None and has_finished_parts(job.parts):
        changed = ["an unknown way, as there is no readable plan.json"]
    if not changed and found is None:
        job.parts.mkdir(exist_ok=True)
        _write(path, plan)
        changed = differences(_read(path) or {}, plan)  # another job of the array may have been first
    if changed:
        if len(changed) > 4:
            changed[3:] = [f"{len(changed) - 3:,} other places"]
        mend = "add --overwrite" if alone else f"remove {job.parts}"
        raise DataError(
            f"{job.parts}: an earlier command has finished parts there, and this one differs in {'; '.join(changed)}; "
            f"{mend} to begin anew, or choose another --output"
        )


def _strangers(parts: Path) -> Iterator[Path]:
    """What lies in the folder of parts and is not of them. A part's files begin with the number of its shard."""
    for path in parts.iterdir() if parts.is_dir() else ():
        if path.name != NAME and not re.match(r"\.|\d{5}", path.name):
            yield path


def has_finished_parts(parts: Path) -> bool:
    return any(parts.glob(f"*{SUFFIX}"))


def _has_documents(parts: Path) -> bool:
    """Whether a finished part has any: where all records were rejected nothing is lost. One that cannot be read may have."""
    for manifest in parts.glob(f"*{SUFFIX}"):
        found = _read(manifest)
        if found is None or found.get("documents") != 0:
            return True
    return False


def move_parts(job: Job, shards: Sequence[Shard], into: Path) -> None:
    """Move the parts, if they are of this plan, at once to `into`, which is about to be removed."""
    found = _read(job.parts / NAME)
    if found is not None and not differences(found, _plan(job, shards)) and not any(_strangers(job.parts)):
        job.parts.rename(into)


def _plan(job: Job, shards: Sequence[Shard]) -> dict[str, Any]:
    names = {shard.name: [file.name for file in shard.files] for shard in shards}
    return {"format": FORMAT, **job.request, "shards": names}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write(path: Path, plan: dict[str, Any]) -> None:
    """Write the plan unless there is one by now; a whole one at any moment."""
    own = path.with_name(f".{NAME}.{os.uname().nodename}.{os.getpid()}")
    try:
        own.write_text(json.dumps(plan, indent=1, ensure_ascii=False) + "\n", "utf-8")
        try:
            os.link(own, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            own.replace(path)
    finally:
        own.unlink(missing_ok=True)
