"""One file from the hub to the disk: resumed where it stopped, tried again with growing waits, checked, then renamed into place."""

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import httpx2
from huggingface_hub.utils import parse_ratelimit_headers

from data_prep.hub import Hub, RemoteFile
from data_prep.manifest import sha256_file
from hybrid_megatron.errors import DataError

CHUNK_BYTES = 1 << 20
FAILURES = 6  # in a row without a new byte
DAMAGED = 3  # whole files with wrong bytes
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, LONGEST_LIMIT_SECONDS = 1.0, 30.0, 600.0


class Stopped(Exception):
    """Another file failed or the user stopped the command; what came so far lies in the partial file."""


class _Transient(Exception):
    """A failure that may pass; `wait` is how long the hub asks to wait, in seconds."""

    def __init__(self, reason: str, wait: float = 0.0):
        super().__init__(reason)
        self.wait = wait


def download(
    hub: Hub, commit: str, file: RemoteFile, partial: Path, target: Path, count: Callable[[int], None], stop: threading.Event
) -> str:
    """Bring `file` to `target` by way of `partial` and return its SHA-256; `count` hears of bytes won, or lost (negative).

    Raises `DataError` when the hub refuses, fails `FAILURES` times in a row or sends wrong bytes `DAMAGED` times; `OSError` when the disk
    does not take it; `Stopped`.
    """
    partial.parent.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial.touch()
    count(partial.stat().st_size)
    failures = damaged = 0
    while True:
        before = partial.stat().st_size
        try:
            if before != file.size:
                _append(hub, commit, file, partial, count, stop)
            sha256 = check(partial, file)
            if sha256 is not None:
                os.replace(partial, target)
                return sha256
            count(-partial.stat().st_size)
            partial.unlink()
            partial.touch()
            damaged += 1
            if damaged == DAMAGED:
                raise DataError(f"{file.path} came with wrong bytes {DAMAGED} times (its hash differs); try later, or check --endpoint")
        except (_Transient, httpx2.RequestError) as error:
            failures = 0 if partial.stat().st_size > before else failures + 1
            if failures == FAILURES:
                reason = str(error).strip() or type(error).__name__
                sentence = f"{file.path} could not be fetched from {hub.endpoint} ({reason}) in {FAILURES} attempts"
                raise DataError(f"{sentence}; run the same command again to go on") from None
            wait = min(FIRST_WAIT_SECONDS * 2**failures, LONGEST_WAIT_SECONDS)
            if stop.wait(max(wait, getattr(error, "wait", 0.0))):
                raise Stopped from None


def check(path: Path, file: RemoteFile) -> str | None:
    """The SHA-256 of the file at `path`, or None unless it is there and is `file`, byte for byte."""
    if not path.is_file() or path.stat().st_size != file.size:
        return None
    sha256 = sha256_file(path)
    if file.sha256 is not None:
        return sha256 if sha256 == file.sha256 else None
    blob = hashlib.sha1(b"blob %d\0" % file.size)  # how git names content
    with path.open("rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            blob.update(chunk)
    return sha256 if blob.hexdigest() == file.git_sha1 else None


def _append(hub: Hub, commit: str, file: RemoteFile, partial: Path, count: Callable[[int], None], stop: threading.Event) -> None:
    """Append the rest of the file to `partial`; all of it where the hub does not resume."""
    held = partial.stat().st_size
    offset = held if held < file.size else 0
    with hub.stream(commit, file.path, offset) as response, partial.open("ab") as opened:
        if response.status_code in (408, 425, 429) or response.status_code >= 500:
            raise _Transient(f"status {response.status_code}", _asked_wait(response))
        hub.refuse(response)
        if response.status_code != 206:
            count(-held)
            opened.truncate(0)
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
            raise _Transient("the hub sent another part than it was asked for")
        for chunk in response.iter_bytes():  # as they come: chunks of one size would hold bytes back, and lose them with the connection
            opened.write(chunk)
            count(len(chunk))
            if stop.is_set():
                raise Stopped
        opened.flush()
        os.fsync(opened.fileno())
    if partial.stat().st_size < file.size:
        raise _Transient("the connection ended early")


def _asked_wait(response: httpx2.Response) -> float:
    after = response.headers.get("Retry-After", "")
    limit = parse_ratelimit_headers(response.headers)
    seconds = float(after) if after.isdigit() else limit.reset_in_seconds + 1.0 if limit and not limit.remaining else 0.0
    return min(seconds, LONGEST_LIMIT_SECONDS)
