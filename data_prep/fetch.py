"""`fetch`: as many shards of a public corpus as a budget of tokens needs, from the Hugging Face hub, at one commit, each checked.

`DIR/fetch.manifest.json` says what was asked for, the commit, and every file with its size, hash and state. It is there from the start;
run again, the command checks each file that is there and brings what is missing or damaged. Half a file waits in `DIR/.fetch.partial`.
"""

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.corpora import CORPORA, Corpus
from data_prep.download import Stopped, check, download
from data_prep.hub import Hub, RemoteFile
from data_prep.manifest import SUFFIX
from data_prep.progress import Progress, human_bytes
from data_prep.publish import lock_folder, output_error
from data_prep.shards import choose, shards_of
from hybrid_megatron.errors import DataError

NAME = f"fetch{SUFFIX}"  # with that suffix `tokenize --input DIR` takes it for no document
PARTIAL = ".fetch.partial"
FORMAT = 1
# What has to stay the same in a folder; --tokens and --margin may change as long as the list of shards only grows.
FIXED = ("corpus", "repository", "revision", "patterns", "seed")
FREE = ("tokens", "margin", "tokens_per_byte")
SAVE_SECONDS = 10.0


@dataclass(frozen=True)
class Request:
    """What to fetch. None and () stand for the corpus's own repository, revision, patterns and ratio of tokens to bytes."""

    corpus: str
    tokens: int
    seed: int = 0
    margin: float = 0.05
    repository: str | None = None
    revision: str | None = None
    patterns: tuple[str, ...] = ()
    tokens_per_byte: float | None = None
    endpoint: str | None = None

    @property
    def known(self) -> Corpus:
        return CORPORA[self.corpus]

    def hub(self) -> Hub:
        """Raises `DataError` for a corpus that needs `--repository`."""
        repository = self.repository or self.known.repository
        if repository is None:
            out = "fetch it there, or name a mirror on the hub that you trust with --repository OWNER/NAME"
            raise DataError(f"{self.corpus} is published at {self.known.home}, and no mirror of it on the hub is known; {out}")
        return Hub(repository, self.endpoint)

    def asked_revision(self) -> str:
        """The corpus's pinned commit is one of its own repository's; another repository's main is resolved once."""
        return self.revision or ("main" if self.repository not in (None, self.known.repository) else self.known.revision)


def plan(request: Request, commit: str | None = None) -> dict[str, Any]:
    """The manifest of a fetch that has not begun: what the seed and the budget choose. Asks the hub; downloads nothing."""
    hub = request.hub()
    commit = commit or hub.commit(request.asked_revision())
    patterns = request.patterns or request.known.patterns
    ratios = request.known.tokens_per_byte if request.tokens_per_byte is None else {"": request.tokens_per_byte}
    shards = shards_of(hub.files(commit), patterns, ratios)
    chosen = choose(shards, request.seed, request.tokens, request.margin)
    files = [{**vars(shard.file), "tokens": shard.tokens, "state": "missing"} for shard in chosen]
    return {
        "format": FORMAT,
        "corpus": request.corpus,
        "licence": request.known.licence,
        "text_key": request.known.text_key,
        "repository": hub.repository,
        "asked_revision": request.asked_revision(),
        "revision": commit,
        "patterns": list(patterns),
        "seed": request.seed,
        "tokens": request.tokens,
        "margin": request.margin,
        "tokens_per_byte": request.tokens_per_byte,
        "estimated_tokens": sum(shard.tokens for shard in chosen),
        "bytes": sum(shard.file.size for shard in chosen),
        "corpus_shards": len(shards),
        "corpus_bytes": sum(shard.file.size for shard in shards),
        "files": files,
    }


def fetch(request: Request, output: Path, workers: int = 4) -> tuple[dict[str, Any], int]:
    """Bring the chosen shards to `output`, under their paths in the repository; returns the manifest and how many were fetched now.

    Raises `DataError` for all that the user can mend: the hub, the disk, or a folder that holds another fetch.
    """
    with _output(output):
        old = read_fetch(output)
        manifest = _continued(request, old) if old is not None else plan(request)
        _check_space(output, manifest["files"])
        _save(output, manifest)
        fetched = _bring_all(request.hub(), manifest, output, workers)
        shutil.rmtree(output / PARTIAL, ignore_errors=True)
    return manifest, fetched


def read_fetch(output: Path) -> dict[str, Any] | None:
    """The manifest in a folder, or None where there is none. Raises `DataError` if it is damaged."""
    try:
        manifest = json.loads((output / NAME).read_text("utf-8"))
        if manifest["format"] == FORMAT and all(key in manifest for key in (*FIXED, *FREE, "asked_revision", "bytes")):
            for entry in manifest["files"]:
                _remote(entry)
            return manifest
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        pass
    raise DataError(f"{output / NAME} is damaged; delete it and run the command again: whole files that are there are kept")


def _continued(request: Request, old: dict[str, Any]) -> dict[str, Any]:
    """The manifest to go on with. The hub is asked only for what the old one does not say."""
    pinned = old["revision"] if request.asked_revision() in (old["asked_revision"], old["revision"]) else None
    hub = request.hub()
    asked = {"corpus": request.corpus, "repository": hub.repository, "seed": request.seed}
    asked["patterns"] = list(request.patterns or request.known.patterns)
    asked["revision"] = pinned or hub.commit(request.asked_revision())
    changed = [f"{key} {old[key]} -> {asked[key]}" for key in FIXED if old[key] != asked[key]]
    if changed:
        raise DataError(f"the folder holds another fetch ({'; '.join(changed)}); choose another --output, or ask for the same")
    if all(old[key] == getattr(request, key) for key in FREE):
        return old
    new = plan(request, asked["revision"])
    before, after = [[entry["path"] for entry in manifest["files"]] for manifest in (old, new)]
    if after[: len(before)] != before:
        raise DataError(
            f"the folder holds a fetch of {len(before):,} shards, and what is asked now takes {len(after):,}; "
            "a fetch can only be extended: ask for more tokens, or choose another --output"
        )
    return new


def _bring_all(hub: Hub, manifest: dict[str, Any], output: Path, workers: int) -> int:
    """Check or download every file of the manifest, a few at once; returns how many were downloaded. Keeps the manifest's states."""
    progress = Progress(manifest["corpus"], manifest["bytes"])
    done, fetched, lock, stop = 0, 0, threading.Lock(), threading.Event()

    def count(change: int) -> None:
        nonlocal done
        with lock:
            done += change

    def bring(entry: dict[str, Any]) -> None:
        nonlocal fetched
        if stop.is_set():
            raise Stopped
        file, target = _remote(entry), output / entry["path"]
        sha256 = check(target, file)
        if sha256 is not None:
            count(file.size)
        else:
            entry["state"] = "missing"
            sha256 = download(hub, manifest["revision"], file, output / PARTIAL / entry["path"], target, count, stop)
            with lock:
                fetched += 1
        entry.update(sha256=sha256, state="complete")

    saved = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        pending = {pool.submit(bring, entry) for entry in manifest["files"]}
        try:
            while pending:
                finished, pending = wait(pending, timeout=0.5, return_when=FIRST_EXCEPTION)
                for future in finished:
                    future.result()
                progress.update(done)
                if time.monotonic() - saved > SAVE_SECONDS:
                    _save(output, manifest)
                    saved = time.monotonic()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
            progress.close()
            _save(output, manifest)
    return fetched


def _remote(entry: dict[str, Any]) -> RemoteFile:
    return RemoteFile(*(entry[key] for key in ("path", "size", "sha256", "git_sha1")))


def _save(output: Path, manifest: dict[str, Any]) -> None:
    staged = output / f".{NAME}.partial"
    with staged.open("w", encoding="utf-8", newline="\n") as file:
        file.write(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(staged, output / NAME)


def _check_space(output: Path, files: list[dict[str, Any]]) -> None:
    def held(entry: dict[str, Any]) -> int:
        places = (output / entry["path"], output / PARTIAL / entry["path"])
        sizes = [place.stat().st_size if place.is_file() else 0 for place in places]
        return entry["size"] if sizes[0] == entry["size"] else min(sizes[1], entry["size"])

    needed = sum(entry["size"] - held(entry) for entry in files)
    free = shutil.disk_usage(output).free
    if needed > free:
        short = f"{human_bytes(needed)} are still to be fetched, and {human_bytes(free)} are free"
        raise DataError(f"{output}: {short}; free some space there, choose another --output or ask for fewer --tokens")


@contextlib.contextmanager
def _output(output: Path) -> Iterator[None]:
    """The output folder, made and locked; whatever the disk refuses becomes a `DataError` about it."""
    missing = [folder for folder in (output, *output.parents) if not folder.exists()]
    lock = None
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(output)
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):  # folders made here, while they are empty
            for folder in missing:
                folder.rmdir()
        if isinstance(error, OSError):
            raise output_error(output, error) from None
        raise
    finally:
        if lock is not None:
            os.close(lock)
